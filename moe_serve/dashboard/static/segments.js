// A choice of one of a few, as buttons in a row.
import { html } from "./state.js";
import { PHASES, phase } from "./url.js";

const PHASE_NAMES = { all: "All", prefill: "Prefill", decode: "Decode" };

/** picked: the signal that holds the choice. names, titles: by choice. */
export const Segments = (/** @type {any} */ { name, all, picked, names, titles = {} }) => html`
  <div class="segments" role="group" aria-label=${name}>${all.map((/** @type {string} */ key) => html`
    <button type="button" aria-pressed=${picked.value === key} title=${titles[key]} onClick=${() => { picked.value = key; }}>${names[key]}</button>`)}</div>`;

/** Which tokens count; one choice for every view that shows load by expert. */
export const PhaseChoice = () => html`<${Segments} name="Phase" all=${PHASES} picked=${phase} names=${PHASE_NAMES}/>`;
