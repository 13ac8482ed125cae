// The map as words: the 50 hottest cells in a table.
import { fairShare, loadOf } from "./figures.js";
import { hottest } from "./heatview.js";
import { cursor, frame, html, placement } from "./state.js";
import { chosen, layer, phase } from "./url.js";
import { listedOn, short } from "./words.js";

const SHOWN = 50;

/** Open the panel of an expert from a link in a list. */
export function ExpertLink(/** @type {any} */ { at, expert }) {
  const open = () => { cursor.value = { layer: at, expert }; layer.value = at; chosen.value = { layer: at, expert }; };
  return html`<button type="button" class="link" onClick=${open}>L${at} E${expert}</button>`;
}

export function HottestTable() {
  const f = frame.value;
  if (!f) return html`<p class="none">No window yet.</p>`;
  const { load, layerSum } = loadOf(f, phase.value);
  const p = placement.value?.experts === f.experts ? placement.value : null;
  return html`<div class="scroll hottest" tabindex="0" role="group" aria-label="50 hottest experts"><table>
    <caption class="spoken">The 50 experts with most load, ${phase.value === "all" ? "all phases" : phase.value}, window ${f.window}</caption>
    <thead><tr><th scope="col" class="r">#</th><th scope="col">Expert</th><th scope="col" class="r">Pairs/s</th><th scope="col" class="r">Of fair share</th><th scope="col" class="r">Prefill</th><th scope="col" class="r">Decode</th><th scope="col" class="r">Replicas</th><th scope="col">On ranks</th></tr></thead>
    <tbody>${hottest(load, SHOWN).map((i, n) => {
      const [at, expert] = [Math.floor(i / f.experts), i % f.experts];
      return html`<tr key=${i} data-cell=${i}><td class="r n muted">${n + 1}</td><td><${ExpertLink} at=${at} expert=${expert}/></td><td class="r n" data-pairs=${load[i]}>${short(load[i])}</td>
        <td class="r n">${layerSum[at] > 0 ? `${fairShare(load[i], layerSum[at], f.experts).toFixed(2)}×` : "–"}</td>
        <td class="r n">${short(f.load[0][i])}</td><td class="r n">${short(f.load[1]?.[i] ?? 0)}</td>
        <td class="r n">${p ? p.replicas[i] : "–"}</td><td class="n">${p ? listedOn(p, i).join(", ") || "none" : "–"}</td></tr>`;
    })}</tbody></table></div>`;
}
