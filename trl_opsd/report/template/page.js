// Shows what both models say of the token under the pointer or the focus, and takes a keyboard through the tokens.
"use strict";
const panel = document.getElementById("detail");
const visible = (text) => text.replace(/ /g, "␣").replace(/↵?\n/g, "↵").replace(/\t/g, "⇥") || "part of a character";
const percent = (value) => value === null ? "–" : (100 * value).toFixed(1) + " %";
const tokenAt = (event) => event.target instanceof Element ? event.target.closest("[data-v]") : null;

function show(token) {
  const [nats, student, teacher, choices] = JSON.parse(token.dataset.v);
  const said = nats === null ? "not in the loss" : `${nats.toFixed(3)} nats; student ${percent(student)}, teacher ${percent(teacher)}`;
  const lines = choices.map(([text, share]) => `${visible(text)}  ${percent(share)}`);
  const by = token.dataset.by ? `; written by the ${token.dataset.by}` : "";
  panel.textContent = [`${visible(token.textContent)}  ${said}${by}`, ...lines].join("\n");
  panel.hidden = false;
}

for (const kind of ["mouseover", "focusin", "click"]) {
  document.addEventListener(kind, (event) => { const token = tokenAt(event); if (token) show(token); });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") panel.hidden = true;
  const to = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = to && tokenAt(event)?.[to];
  if (!next) return;
  event.preventDefault();
  next.focus();
});
