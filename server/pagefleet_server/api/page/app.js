// The page's only script: chat on the left (chat.js), live figures on the right (live.js).
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const THEMES = ["auto", "light", "dark"];

function followTheme(button) {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme];
    button.setAttribute("aria-label", `Colours: ${theme === "auto" ? "automatic" : theme}`);
  };
  let theme = localStorage.getItem("theme");
  theme = THEMES.includes(theme) ? theme : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("theme", theme);
    show(theme);
  });
}

const byId = (id) => document.getElementById(id);
followTheme(byId("theme"));
new Live(byId).start();
new Chat(byId).start();
