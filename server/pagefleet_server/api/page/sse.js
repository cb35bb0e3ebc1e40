// Server-sent events from a stream of texts, however it is cut; and what they say. Pure: tested outside a browser.

export class EventReader {
  #rest = "";

  // The data of each event that is complete now.
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  }
}

// One event as { text, thought, usage, error, done, finish }.
export function readEvent(data) {
  if (data === "[DONE]") return { done: true };
  const event = JSON.parse(data);
  if (event.error) return { error: event.error.message };
  const choice = event.choices && event.choices[0];
  const delta = (choice && choice.delta) || {};
  const calls = (delta.tool_calls || []).map((call) => (call.function && call.function.arguments) || "").join("");
  return {
    text: (choice && choice.text) || delta.content || calls || "",
    thought: delta.reasoning_content || "",
    finish: (choice && choice.finish_reason) || null,
    usage: event.usage || null,
  };
}

// Text with ``` fences -> [{ code: boolean, text }], in order.
export function splitCode(text) {
  return text
    .split(/^```[^\n]*\n?/m)
    .map((part, index) => ({ code: index % 2 === 1, text: part }))
    .filter((part) => part.text !== "");
}
