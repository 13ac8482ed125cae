// Questions that must be answered before something is done. One dialog is open at most; it is the
// browser's own, so focus stays inside and comes back.
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { signal } from "./vendor/signals.js";
import { html } from "./state.js";

/** {title, says: [sentences], field, yes, act, done, busy, error} or null. */
const open = signal(/** @type {any} */ (null));

/**
 * Ask. `act(value)` is called on yes and gives {ok, error, data}; the dialog stays open on a fault and
 * shows the server's words. Resolves with the answer of `act`, or null where the person said no.
 * field: {label, type, name, value, required, options} for one input.
 * @param {{title: string, says: string[], yes: string, act: (value: string) => Promise<any>, field?: any}} what
 * @returns {Promise<any>}
 */
export function confirm(what) {
  return new Promise((done) => { open.value = { ...what, done, busy: false, error: null }; });
}

function Field(/** @type {any} */ { field }) {
  if (field.options) return html`<label class="field">${field.label}<select name="value">${field.options.map((/** @type {string[]} */ [value, words]) => html`<option value=${value}>${words}</option>`)}</select></label>`;
  return html`<label class="field">${field.label}<input name="value" type=${field.type ?? "text"} required=${field.required} maxlength="4096" autocomplete="off" spellcheck=${false}/></label>`;
}

export function Dialogs() {
  const dialog = useRef(/** @type {any} */ (null));
  const now = open.value;
  const shown = now !== null;
  useEffect(() => { if (shown && !dialog.current.open) dialog.current.showModal(); }, [shown]);
  if (!now) return null;
  const close = (/** @type {any} */ answer) => { dialog.current?.close(); open.value = null; now.done(answer); };
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const input = /** @type {any} */ (event.target).elements.value;
    // An order that is sent cannot be called back: until its answer the dialog stays.
    open.value = { ...now, busy: true, error: null };
    const answer = await now.act(input ? input.value : "");
    if (answer.ok) close(answer);
    else open.value = { ...now, busy: false, error: answer.error };
  };
  return html`<dialog class="ask" ref=${dialog} aria-labelledby="ask-title" onKeyDown=${(/** @type {KeyboardEvent} */ e) => { if (e.key === "Escape" && now.busy) e.preventDefault(); }} onCancel=${(/** @type {Event} */ e) => { e.preventDefault(); if (!now.busy) close(null); }}>
    <form onSubmit=${submit}><h2 id="ask-title">${now.title}</h2>
      ${now.says.map((/** @type {string} */ line) => html`<p>${line}</p>`)}
      ${now.field && html`<${Field} field=${now.field}/>`}
      <div role="alert">${now.error && html`<p class="fault" data-figure="fault">▲ ${now.error.message} ${now.error.next_step ?? ""}</p>`}</div>
      <div class="buttons"><button type="button" class="quiet" disabled=${now.busy} onClick=${() => close(null)}>Cancel</button><button type="submit" class="act" disabled=${now.busy}>${now.busy ? "…" : now.yes}</button></div></form></dialog>`;
}
