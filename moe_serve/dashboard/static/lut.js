// Colour tables, 256 steps each, worked out here in OKLab: lightness grows evenly along the heat
// table, so it reads the same for every kind of colour vision and in grey.
//
// Heat is one-way (load, replicas). Share is two-way (load / fair share): the middle is the fair
// share, blue is below, orange above; its middle is near the background, so that what is fair is calm.

/** @typedef {[number, number, number]} Rgb 0..255 each */

const STEPS = 256;

/** OKLab to sRGB bytes. @returns {Rgb} */
function srgb(/** @type {number} */ light, /** @type {number} */ a, /** @type {number} */ b) {
  const l = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return /** @type {Rgb} */ ([
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => {
    const c = Math.min(1, Math.max(0, x));
    return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
  }));
}

/**
 * Table through anchors [lightness, chroma, hue in degrees], evenly spaced. Between two of them the
 * way is straight in a and b: by hue it would lead through colours that mean nothing.
 * @returns {Uint8Array} STEPS x 3
 */
function ramp(/** @type {number[][]} */ anchors) {
  const lab = anchors.map(([light, chroma, hue]) => [light, chroma * Math.cos((hue * Math.PI) / 180), chroma * Math.sin((hue * Math.PI) / 180)]);
  const out = new Uint8Array(STEPS * 3);
  for (let i = 0; i < STEPS; i++) {
    const at = (i / (STEPS - 1)) * (lab.length - 1);
    const left = Math.min(lab.length - 2, Math.floor(at));
    const mix = [0, 1, 2].map((k) => lab[left][k] + (lab[left + 1][k] - lab[left][k]) * (at - left));
    out.set(srgb(mix[0], mix[1], mix[2]), i * 3);
  }
  return out;
}

export const HEAT = ramp([
  [0.30, 0.100, 292], [0.42, 0.120, 276], [0.54, 0.105, 245], [0.66, 0.105, 195], [0.78, 0.130, 155], [0.88, 0.150, 118], [0.96, 0.120, 103],
]);
const SHARE_DARK = ramp([
  [0.80, 0.110, 235], [0.64, 0.130, 245], [0.46, 0.090, 255], [0.33, 0.020, 260], [0.50, 0.110, 45], [0.68, 0.160, 52], [0.86, 0.150, 75],
]);
const SHARE_LIGHT = ramp([
  [0.42, 0.130, 250], [0.58, 0.130, 242], [0.76, 0.080, 235], [0.94, 0.010, 240], [0.80, 0.110, 65], [0.64, 0.160, 48], [0.46, 0.140, 38],
]);

/** Two-way table of a theme. */
export const share = (/** @type {boolean} */ dark) => (dark ? SHARE_DARK : SHARE_LIGHT);

/** Colour at a position 0..1 of a table. @returns {Rgb} */
export function at(/** @type {Uint8Array} */ table, /** @type {number} */ position) {
  const i = 3 * Math.round(Math.min(1, Math.max(0, position)) * (STEPS - 1));
  return [table[i], table[i + 1], table[i + 2]];
}

export const css = (/** @type {Rgb} */ rgb) => `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`;

/** Text that can be read on a colour: black or white, whichever differs more; never below 4.5 to 1. */
export function ink(/** @type {Rgb} */ rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
