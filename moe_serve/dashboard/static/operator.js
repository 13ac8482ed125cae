// Orders: only for an operator, each after a question that says what will happen. The token is typed
// into a dialog, sent once and kept nowhere.
import { signal } from "./vendor/signals.js";
import { ask, askSession, order, session } from "./api.js";
import { confirm } from "./dialogs.js";
import { computed_plan } from "./plan.js";
import { html, placement, ranks } from "./state.js";
import { showPlan } from "./url.js";

/** What the last order came to, in words. */
const said = signal("");

async function login() {
  const { needs_token } = session.value;
  const answer = await confirm({
    title: "Operator",
    says: needs_token
      ? ["Give the token of role admin. It is checked by the controller, sent once and not stored; the session ends by itself."]
      : ["This service runs without tokens: whoever is on this machine may give orders. They are logged."],
    field: needs_token ? { label: "Token", type: "password", required: true } : undefined,
    yes: needs_token ? "Sign in" : "Take control",
    act: (token) => ask("/api/v1/session", { method: "POST", body: needs_token ? { token } : {} }),
  });
  if (answer) { session.value = { offered: true, csrf: "", ...session.value, ...answer.data }; said.value = ""; }
}

async function logout() {
  await ask("/api/v1/session", { method: "DELETE" });
  await askSession();
}

async function pause() {
  const answer = await confirm({
    title: "Pause placement",
    says: ["No plan begins by itself until somebody resumes; steps that run are finished. Requests are served as before, and lost ranks are still replaced."],
    field: { label: "Reason, for the others" },
    yes: "Pause",
    act: (reason) => order("pause", reason ? { reason } : {}),
  });
  if (answer) said.value = "Paused.";
}

async function resume() {
  const answer = await confirm({ title: "Resume placement", says: ["Plans begin by themselves again, from the next window on."], yes: "Resume", act: () => order("resume", {}) });
  if (answer) said.value = "Resumed.";
}

async function compute() {
  const answer = await confirm({
    title: "Compute a plan",
    says: ["The controller works out what it would move now. Nothing moves; the difference is shown, and you may apply it then."],
    yes: "Compute",
    act: () => order("plan", {}),
  });
  if (!answer) return;
  const id = answer.data.plan?.plan_id ?? "";
  if (!answer.data.plan?.moves?.length) { said.value = `Nothing would move.${answer.data.plan?.refused?.[0] ? ` ${answer.data.plan.refused[0]}` : ""}`; return; }
  computed_plan.value = id;
  said.value = `Plan ${id} is computed; nothing has moved.`;
  showPlan(id);
}

async function drain() {
  const choice = ranks.value.filter((/** @type {any} */ r) => r.state === "up" || r.state === "suspect");
  if (!choice.length) { said.value = "No rank is up: there is none to drain."; return; }
  const answer = await confirm({
    title: "Drain a rank",
    says: ["Its experts are copied to the other ranks and it takes no more requests. It stays in the service, empty, until it is undrained or removed."],
    field: { label: "Rank", options: choice.map((/** @type {any} */ r) => [String(r.rank), `rank ${r.rank} on ${r.node}`]) },
    yes: "Drain",
    act: (rank) => order("drain", { rank: Number(rank) }),
  });
  if (answer) said.value = answer.data?.message || "Draining.";
}

async function undrain() {
  const choice = ranks.value.filter((/** @type {any} */ r) => r.state === "draining");
  if (!choice.length) { said.value = "No rank is draining: there is none to undrain."; return; }
  const answer = await confirm({
    title: "Undrain a rank",
    says: ["It takes experts and requests again, as plans give them to it."],
    field: { label: "Rank", options: choice.map((/** @type {any} */ r) => [String(r.rank), `rank ${r.rank} on ${r.node}`]) },
    yes: "Undrain",
    act: (rank) => order("undrain", { rank: Number(rank) }),
  });
  if (answer) said.value = answer.data?.message || "Undrained.";
}

/** The button in the header of a page that is not in command. */
export function OperatorButton() {
  if (!session.value.offered || session.value.operator) return null;
  return html`<button type="button" class="quiet" data-figure="operator" onClick=${login}>Operator</button>`;
}

/** The bar of orders; a page that only reads has none. */
export function OperatorBar() {
  if (!session.value.operator) return null;
  const paused = placement.value?.state === "paused";
  const some = ranks.value.some((/** @type {any} */ r) => r.state === "draining");
  return html`<div class="operator" role="toolbar" aria-label="Operator">
    <b>Operator</b>
    ${paused ? html`<button type="button" class="act" onClick=${resume}>Resume</button>` : html`<button type="button" class="act" onClick=${pause}>Pause</button>`}
    <button type="button" class="act" onClick=${compute}>Plan</button>
    <button type="button" class="act" onClick=${drain}>Drain a rank</button>
    ${some && html`<button type="button" class="act" onClick=${undrain}>Undrain</button>`}
    <span class="said" role="status" data-figure="said">${said.value}</span>
    <button type="button" class="quiet last" onClick=${logout}>Sign out</button></div>`;
}
