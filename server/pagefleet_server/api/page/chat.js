// The conversation: kept in memory only, answered by streaming.
import { EventReader, readEvent, splitCode } from "./sse.js";

const FINISHES = { length: "cut off: the limit of tokens is reached", tool_calls: "the model calls a tool" };

export class Chat {
  #messages = [];
  #abort = null;
  #completions = false; // the model has no chat template

  constructor(byId) {
    this.at = byId;
  }

  start() {
    const { at } = this;
    at("key").value = sessionStorage.getItem("key") || "";
    at("key").addEventListener("change", () => sessionStorage.setItem("key", at("key").value));
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    at("stop").addEventListener("click", () => this.#abort && this.#abort.abort());
    at("clear").addEventListener("click", () => this.#clear());
    at("prompt").focus();
  }

  #clear() {
    if (this.#abort) this.#abort.abort();
    this.#messages = [];
    this.at("log").replaceChildren(this.at("empty"));
    this.at("empty").hidden = false;
    this.at("usage").textContent = "";
    this.#complain(null);
  }

  async #send() {
    const text = this.at("prompt").value;
    if (!text.trim() || this.#abort) return;
    this.at("prompt").value = "";
    this.#complain(null);
    const messages = this.#messages;
    messages.push({ role: "user", content: text });
    this.#show("user", "You").set(text, "");
    const view = this.#show("assistant", "Model");
    const answer = { text: "", thought: "", finish: null, usage: null };
    this.#abort = new AbortController();
    this.#busy(true);
    try {
      await this.#stream(answer, view, this.#abort.signal);
      if (answer.finish in FINISHES) view.note(FINISHES[answer.finish]);
    } catch (error) {
      if (error.name === "AbortError") view.note("stopped");
      else this.#complain(error.message);
    } finally {
      this.#abort = null;
      this.#busy(false);
      view.end();
    }
    if (answer.text || answer.thought) {
      messages.push({ role: "assistant", content: answer.text });
    } else if (messages === this.#messages) {
      messages.pop(); // nothing came: the question may be asked again
      if (!this.at("prompt").value) this.at("prompt").value = text;
    }
    this.at("prompt").focus();
  }

  async #stream(answer, view, signal) {
    const begun = performance.now();
    const response = await this.#ask(signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      for (const data of events.feed(value)) {
        const event = readEvent(data);
        if (event.error) throw new Error(event.error);
        if (event.done) return this.#tellUsage(answer.usage, performance.now() - begun);
        answer.text += event.text;
        answer.thought += event.thought;
        answer.finish = event.finish || answer.finish;
        answer.usage = event.usage || answer.usage;
        view.set(answer.text, answer.thought);
      }
    }
  }

  async #ask(signal) {
    const number = (id) => (this.at(id).value === "" ? undefined : Number(this.at(id).value));
    const common = {
      stream: true,
      stream_options: { include_usage: true },
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
    };
    const system = this.at("system").value;
    const all = system ? [{ role: "system", content: system }, ...this.#messages] : this.#messages;
    const headers = { "Content-Type": "application/json" };
    if (this.at("key").value) headers.Authorization = `Bearer ${this.at("key").value}`;
    const post = (path, body) => fetch(path, { method: "POST", headers, signal, body: JSON.stringify(body) });
    const complete = () => post("v1/completions", { ...common, prompt: this.#messages.at(-1).content });
    let response = this.#completions ? await complete() : await post("v1/chat/completions", { ...common, messages: all });
    let error = response.ok ? null : await readError(response);
    if (error && error.code === "no_chat_template") {
      this.#completions = true;
      response = await complete();
      error = response.ok ? null : await readError(response);
    }
    if (error) throw new Error(error.message);
    return response;
  }

  #tellUsage(usage, milliseconds) {
    if (!usage) return;
    const seconds = (milliseconds / 1000).toFixed(1);
    this.at("usage").textContent = `${usage.prompt_tokens} + ${usage.completion_tokens} tokens, ${seconds} s`;
  }

  #busy(is) {
    this.at("send").disabled = is;
    this.at("stop").disabled = !is;
  }

  #complain(message) {
    this.at("error").hidden = message === null;
    this.at("error").textContent = message || "";
  }

  #show(role, who) {
    const log = this.at("log");
    this.at("empty").hidden = true;
    const message = make("div", `message ${role}`);
    const thought = make("div", "thought");
    const body = make("div", "body");
    thought.hidden = true;
    message.append(make("div", "who", who), thought, body);
    message.setAttribute("aria-busy", String(role === "assistant"));
    log.append(message);
    const follow = () => {
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
    };
    log.scrollTop = log.scrollHeight;
    return {
      set(text, thinking) {
        thought.hidden = !thinking;
        thought.textContent = thinking;
        body.replaceChildren(...splitCode(text).map(renderPart));
        follow();
      },
      note(text) {
        message.append(make("div", "note", text));
        follow();
      },
      end() {
        message.setAttribute("aria-busy", "false");
      },
    };
  }
}

async function readError(response) {
  try {
    const { error } = await response.json();
    const retry = response.headers.get("Retry-After");
    return { code: error.code, message: error.message + (retry ? ` (again in ${retry} s)` : "") };
  } catch {
    return { code: null, message: `The server answered ${response.status}.` };
  }
}

// Text only: what a model writes is never taken for HTML.
function renderPart(part) {
  if (!part.code) return document.createTextNode(part.text);
  const block = document.createElement("pre");
  block.append(make("code", "", part.text));
  return block;
}

function make(tag, name, text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.textContent = text;
  return node;
}
