// Prometheus text -> numbers, and percentiles of what histograms gained. Pure: tested outside a browser.

// Sample name with its labels other than model_name and engine -> value.
export function readMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = [...(match[2] || "").matchAll(/([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g)]
      .filter(([, name]) => name !== "model_name" && name !== "engine")
      .map(([, name, value]) => `${name}=${value}`);
    samples.set([match[1], ...labels].join("|"), Number(match[3].replace("+Inf", "Infinity")));
  }
  return samples;
}

// Upper edge of each bucket -> how many values at most so large came between two scrapes.
export function histogramGain(before, after, name) {
  const gain = [];
  for (const [key, value] of after) {
    if (!key.startsWith(`${name}_bucket|le=`)) continue;
    const edge = key.slice(`${name}_bucket|le=`.length);
    gain.push([edge === "+Inf" ? Infinity : Number(edge), value - (before.get(key) || 0)]);
  }
  return gain.sort(([left], [right]) => left - right);
}

// Linear within its bucket, as Prometheus's histogram_quantile; null without values.
export function quantile(gain, share) {
  if (!gain.length || gain.at(-1)[1] <= 0) return null;
  const rank = share * gain.at(-1)[1];
  let [low, below] = [0, 0];
  for (const [edge, count] of gain) {
    if (count >= rank && count > below) {
      return edge === Infinity ? low : low + ((edge - low) * (rank - below)) / (count - below);
    }
    [low, below] = [edge === Infinity ? low : edge, count];
  }
  return low;
}

export function total(samples, name) {
  let sum = 0;
  for (const [key, value] of samples) if (key === name || key.startsWith(`${name}|`)) sum += value;
  return sum;
}

export function showSeconds(seconds) {
  if (seconds === null || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}

// Cells of the picture: used first, then cached, then free; whoever has something gets at least one.
export function shareCells(used, cached, free, cells) {
  const sum = used + cached + free;
  if (sum === 0) return [0, 0, 0];
  const count = (part) => (part === 0 ? 0 : Math.max(1, Math.floor((part * cells) / sum)));
  const shown = [count(used), count(cached), count(free)];
  const largest = [used, cached, free].indexOf(Math.max(used, cached, free));
  shown[largest] += cells - shown[0] - shown[1] - shown[2];
  return shown;
}
