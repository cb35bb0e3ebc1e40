// The live figures: /metrics, once a second while somebody looks.
import { histogramGain, quantile, readMetrics, shareCells, showSeconds, total } from "./figures.js";

const PERIOD_MS = 1000;
const WINDOW = 60; // scrapes: latencies are of the last minute
const POINTS = 120; // of the charts
const CELLS = 100;
const HISTOGRAMS = {
  ttft: "vllm:time_to_first_token_seconds",
  itl: "vllm:inter_token_latency_seconds",
  queue: "vllm:request_queue_time_seconds",
};
const WANTED = [
  ...Object.values(HISTOGRAMS),
  "vllm:num_requests_running",
  "vllm:num_requests_waiting",
  "vllm:generation_tokens",
  "vllm:kv_cache_usage_perc",
  "pagefleet_kv_blocks",
  "pagefleet_kv_blocks_waiting",
  "pagefleet_requests_oldest_waiting_seconds",
  "pagefleet_requests_rejected",
];
const QUERY = WANTED.map((name) => `name[]=${encodeURIComponent(name)}`).join("&");

export class Live {
  #scrapes = []; // [{ time, samples }], the newest last
  #series = { running: [], waiting: [], rate: [] };
  #paused = false;

  constructor(byId) {
    this.at = byId;
  }

  start() {
    const pause = this.at("pause");
    pause.addEventListener("click", () => {
      this.#paused = !this.#paused;
      pause.setAttribute("aria-pressed", String(this.#paused));
      pause.textContent = this.#paused ? "Go on" : "Pause";
    });
    this.at("blocks").append(...Array.from({ length: CELLS }, () => document.createElement("i")));
    this.#turn();
  }

  async #turn() {
    if (!this.#paused && !document.hidden) await this.#look();
    setTimeout(() => this.#turn(), PERIOD_MS);
  }

  async #look() {
    try {
      const [ready, metrics] = await Promise.all([fetch("readyz"), fetch(`metrics?${QUERY}`)]);
      const state = await ready.json();
      const text = await metrics.text();
      this.#tellState(ready.ok ? "ready" : "waiting", ready.ok ? "ready" : state.detail || state.status);
      this.#tellModel(text);
      this.#take(performance.now() / 1000, readMetrics(text));
    } catch {
      this.#tellState("gone", "no answer");
    }
  }

  #tellState(state, text) {
    this.at("state").dataset.state = state;
    if (this.at("state-text").textContent !== text) this.at("state-text").textContent = text;
  }

  #tellModel(text) {
    const match = /model_name="((?:[^"\\]|\\.)*)"/.exec(text);
    if (match) this.at("model").textContent = match[1];
  }

  #take(time, samples) {
    const before = this.#scrapes.at(-1);
    this.#scrapes.push({ time, samples });
    if (this.#scrapes.length > WINDOW) this.#scrapes.shift();
    const grown = (name) => (before ? total(samples, name) - total(before.samples, name) : 0);
    const rate = before ? Math.max(0, grown("vllm:generation_tokens_total") / (time - before.time)) : 0;
    this.#note("running", total(samples, "vllm:num_requests_running"));
    this.#note("waiting", total(samples, "vllm:num_requests_waiting"));
    this.#note("rate", rate);
    this.#showBlocks(samples);
    this.#showRequests(samples);
    this.#showLatencies(samples);
    this.at("rate").textContent = rate >= 100 ? Math.round(rate) : rate.toFixed(1);
    draw(this.at("queue-chart"), [this.#series.running, this.#series.waiting]);
    draw(this.at("rate-chart"), [this.#series.rate]);
  }

  #note(name, value) {
    this.#series[name].push(value);
    if (this.#series[name].length > POINTS) this.#series[name].shift();
  }

  #showBlocks(samples) {
    const block = (state) => samples.get(`pagefleet_kv_blocks|state=${state}`) || 0;
    const [used, cached, free] = ["used", "cached", "free"].map(block);
    const shown = shareCells(used, cached, free, CELLS);
    const names = [...Array(shown[0]).fill("used"), ...Array(shown[1]).fill("cached")];
    [...this.at("blocks").children].forEach((cell, index) => {
      const name = names[index] || "";
      if (cell.className !== name) cell.className = name;
    });
    const percent = `${Math.round(total(samples, "vllm:kv_cache_usage_perc") * 100)} %`;
    this.at("blocks").setAttribute("aria-label", `${used} used, ${cached} cached, ${free} free blocks`);
    this.at("occupancy").textContent = percent;
    this.at("blocks-used").textContent = used;
    this.at("blocks-cached").textContent = cached;
    this.at("blocks-free").textContent = free;
    this.at("blocks-waiting").textContent = total(samples, "pagefleet_kv_blocks_waiting");
  }

  #showRequests(samples) {
    this.at("running").textContent = total(samples, "vllm:num_requests_running");
    this.at("waiting").textContent = total(samples, "vllm:num_requests_waiting");
    this.at("oldest").textContent = showSeconds(total(samples, "pagefleet_requests_oldest_waiting_seconds"));
    this.at("refused").textContent = total(samples, "pagefleet_requests_rejected_total");
  }

  #showLatencies(samples) {
    const first = this.#scrapes[0].samples;
    for (const [id, name] of Object.entries(HISTOGRAMS)) {
      const gain = histogramGain(first, samples, name);
      this.at(`${id}-50`).textContent = showSeconds(quantile(gain, 0.5));
      this.at(`${id}-95`).textContent = showSeconds(quantile(gain, 0.95));
    }
  }
}

function draw(svg, lines) {
  const top = Math.max(1, ...lines.flat());
  const paths = lines.map((values, index) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const point = (value, at) => `${240 - 2 * (values.length - 1 - at)},${46 - (value * 44) / top}`;
    path.setAttribute("d", values.length > 1 ? `M${values.map(point).join("L")}` : "");
    if (index) path.setAttribute("class", "second");
    return path;
  });
  svg.replaceChildren(...paths);
}
