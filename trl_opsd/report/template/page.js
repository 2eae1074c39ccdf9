// Shows what both models say of the token under the pointer or the focus, and takes a keyboard through the tokens.
"use strict";
(() => {
  const panel = document.getElementById("detail");
  if (!panel) return;
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const visible = (text) => text.replace(/ /g, "␣").replace(/↵?\n/g, "↵").replace(/\t/g, "⇥") || "part of a character";
  const percent = (value) => value === null ? "–" : (100 * value).toFixed(1) + " %";

  function show(token) {
    const [nats, student, teacher, choices] = JSON.parse(token.dataset.v);
    const box = element("div"), left = element("div"), head = element("p");
    head.append(element("code", visible(token.textContent)), nats === null ? " is not in the loss" : " " + nats.toFixed(3) + " nats");
    left.append(head);
    if (nats !== null) {
      left.append(element("p", "student " + percent(student) + ", teacher " + percent(teacher)));
    }
    const list = element("ol");
    for (const [text, share] of choices) {
      const row = element("li"), bar = element("span", "", "bar");
      bar.style.width = 100 * share + "%";
      row.append(element("code", visible(text)), element("span", percent(share)), bar);
      list.append(row);
    }
    box.append(left, list);
    panel.replaceChildren(box);
    panel.hidden = false;
  }

  const tokenAt = (target) => target instanceof Element ? target.closest(".tokens [role=option]") : null;

  function choose(token) {
    for (const one of token.parentElement.querySelectorAll("[aria-selected=true]")) one.setAttribute("aria-selected", "false");
    for (const one of token.parentElement.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    token.tabIndex = 0;
    token.setAttribute("aria-selected", "true");
    show(token);
  }

  document.addEventListener("mouseover", (event) => { const token = tokenAt(event.target); if (token) show(token); });
  document.addEventListener("focusin", (event) => { const token = tokenAt(event.target); if (token) choose(token); });
  document.addEventListener("click", (event) => { const token = tokenAt(event.target); if (token) token.focus(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { panel.hidden = true; return; }
    const token = tokenAt(event.target);
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...token.parentElement.querySelectorAll("[role=option]")], at = all.indexOf(token);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    (all[to] || token).focus();
  });
})();
