// Improves the pages of the console. Every page works without it.
"use strict";

const SECOND_MS = 1000;
const SILENCE_MS = 5000; // Without an event of the stream, the numbers are old.
const CHORD_MS = 1500;

// ---------------------------------------------------------------- age of the data

const age = document.getElementById("age");
const live = document.getElementById("live");
let seenAt = Date.now();
let isLive = false; // since the first event of the stream
let problem = "";

function showAge() {
  if (!age || !live) return;
  const lost = Date.now() - seenAt > SILENCE_MS;
  live.classList.toggle("stale", lost || problem !== "");
  let text = isLive ? "live" : age.textContent;
  if (problem) text = problem;
  else if (lost) text = `disconnected since ${new Date(seenAt).toISOString().slice(11, 19)}Z`;
  if (age.textContent !== text) age.textContent = text;
}

if (live) {
  live.addEventListener("htmx:sse:after:message", () => { seenAt = Date.now(); isLive = true; problem = ""; showAge(); });
  live.addEventListener("problem", (event) => { seenAt = Date.now(); problem = event.detail.data; showAge(); });
  live.addEventListener("alive", () => { seenAt = Date.now(); isLive = true; });
  live.addEventListener("end", (event) => { problem = event.detail.data; showAge(); });
  setInterval(showAge, SECOND_MS);
}

// ---------------------------------------------------------------- copy buttons

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  navigator.clipboard.writeText(button.dataset.copy).then(
    () => { button.textContent = "copied"; },
    () => { button.textContent = "not copied"; },
  );
});

// ---------------------------------------------------------------- keys

let chordUntil = 0;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) return;
  if (Date.now() < chordUntil) {
    chordUntil = 0;
    const link = document.querySelector(`nav [data-key="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
  } else if (event.key === "g") {
    chordUntil = Date.now() + CHORD_MS;
  } else if (event.key === "/") {
    const field = document.querySelector("main input:not([type=hidden]), main select, main textarea");
    if (field) { event.preventDefault(); field.focus(); }
  } else if (event.key === "?") {
    document.getElementById("keys").showModal();
  }
});
