"use strict";
const PERIOD_MS = 5000;
let token = "";

// Insert text only, never markup: operators type the reasons.
function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function table(head, rows) {
  const made = element("table"), top = made.createTHead().insertRow(), body = made.createTBody();
  for (const name of head) { const cell = element("th", name); cell.scope = "col"; top.append(cell); }
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.append(cell instanceof Node ? cell : element("td", cell));
  }
  return made;
}

function span(ms) {
  return ms < 1000 ? `${ms} ms` : ms < 120000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60000)} min`;
}

function cut(one) {
  const cell = element("td");
  for (const each of one.cuts) {
    const text = `replica ${each.replica}: ${each.records} records, ${each.bytes} bytes from byte ${each.offset} on`;
    cell.append(element("div", text));
    if (each.confirmedBytes) cell.append(element("div", `${each.confirmedBytes} of these bytes were acknowledged and are lost`, "alarm"));
    else cell.append(element("div", "none of them was acknowledged", "quiet"));
  }
  if (!one.cuts.length) cell.append(element("span", "nothing", "quiet"));
  return cell;
}

function show(group) {
  const part = element("section");
  part.append(element("h2", group.name));
  if (group.alarm) part.append(element("p", group.alarm, "alarm"));
  if (group.notice) part.append(element("p", group.notice, "quiet"));
  const master = group.master === undefined ? "no master" : `replica ${group.master} is master`;
  part.append(element("p", `Epoch ${group.epoch}: ${master}. ${group.inSync} replicas are in sync; an acknowledgement needs ${group.minInSync}.`));
  part.append(table(["Replica", "Role", "Behind", "Last heartbeat", "Address"], group.replicas.map((one) => [
    String(one.replica), one.role + (one.unclean ? ", unclean" : ""), one.lagBytes === undefined ? "unknown" : `${one.lagBytes} bytes`,
    `${span(one.silentMs)} ago`, one.address])));
  part.append(table(["Epoch", "When", "From", "To", "Reason", "Time without sends", "Cut"], group.history.map((one) => [
    String(one.epoch), new Date(one.atMs).toISOString().replace("T", " ").slice(0, 19) + " UTC",
    one.source === undefined ? "" : String(one.source), String(one.target), one.reason,
    one.source === undefined ? "" : one.awayMs === undefined ? "not measured" : span(one.awayMs), cut(one)])));
  return part;
}

async function refresh() {
  const state = document.getElementById("state"), login = document.getElementById("login");
  try {
    const answer = await fetch("api/v1/replicas", token ? { headers: { Authorization: `Bearer ${token}` } } : {});
    login.style.display = answer.status === 401 ? "block" : "none";
    const found = await answer.json();
    if (!answer.ok) { state.textContent = found.message || found.detail || `The API answered with status ${answer.status}.`; return; }
    document.getElementById("groups").replaceChildren(...found.items.map(show));
    state.textContent = found.items.length ? "" : "No broker group has replicas.";
  } catch (error) {
    state.textContent = `The API cannot be reached: ${error.message}. The tables below may be outdated.`;
  }
}

document.getElementById("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = document.getElementById("token").value.trim();
  refresh();
});
refresh();
setInterval(refresh, PERIOD_MS);
