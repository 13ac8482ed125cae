// Copies the pinned ES modules of the page, with their licences, into the wheel's static folder.
//
//   npm ci && node vendor.mjs            write moe_serve/dashboard/static/vendor
//   npm ci && node vendor.mjs --check    exit 1 where that folder differs
//
// The checker that the page's tests run (axe-core, not in the wheel) goes to tests/browser/vendor.
//
// Nothing is compiled. Two things change: bare imports become relative ones (a browser cannot
// resolve "preact", and an inline import map would need a hole in the content security policy), and
// links to source maps go, because the maps are not shipped.
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modules = join(here, "node_modules");
const target = join(here, "..", "moe_serve", "dashboard", "static", "vendor");

const RELATIVE = {
  "preact": "./preact.js",
  "preact/hooks": "./preact-hooks.js",
  "@preact/signals-core": "./signals-core.js",
};

/** Packages in the order they are listed: source file -> name in the static folder. */
const PACKAGES = [
  { name: "preact", short: "preact", files: { "dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js" } },
  { name: "@preact/signals-core", short: "signals-core", files: { "dist/signals-core.mjs": "signals-core.js" } },
  { name: "@preact/signals", short: "signals", files: { "dist/signals.mjs": "signals.js" } },
  { name: "htm", short: "htm", files: { "dist/htm.mjs": "htm.js" } },
  // The only ES module uPlot ships is not minified; the minified form becomes one with an export.
  { name: "uplot", short: "uplot", files: { "dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css" }, iife: "uPlot" },
];

/** @param {string} text @param {{iife?: string}} of @param {string} out */
function adapt(text, of, out) {
  if (!out.endsWith(".js")) return text.trimEnd() + "\n";
  const relative = text
    .replace(/\bfrom\s*"([^"./][^"]*)"/g, (whole, bare) => {
      if (!(bare in RELATIVE)) throw new Error(`${out} imports ${bare}, which is not vendored`);
      return `from"${RELATIVE[bare]}"`;
    })
    .replace(/\n?\/\/# sourceMappingURL=.*\s*$/, "");
  return relative.trimEnd() + "\n" + (of.iife ? `export default ${of.iife};\n` : "");
}

const wanted = new Map();
const manifest = [];
for (const of of PACKAGES) {
  const folder = join(modules, of.name);
  const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const digests = {};
  for (const [from, out] of Object.entries(of.files)) {
    const text = adapt(readFileSync(join(folder, from), "utf8"), of, out);
    wanted.set(out, text);
    digests[out] = createHash("sha256").update(text).digest("hex");
  }
  wanted.set(`${of.short}.LICENSE.txt`, readFileSync(join(folder, "LICENSE"), "utf8"));
  manifest.push({ package: of.name, version: about.version, license: about.license, sha256: digests });
}
wanted.set("manifest.json", JSON.stringify(manifest, null, 2) + "\n");

/** For the tests: copied as it is. */
const tests = join(here, "..", "tests", "browser", "vendor");
const axe = new Map([["axe.min.js", "axe.min.js"], ["LICENSE", "axe.LICENSE.txt"]].map(([from, out]) => [out, readFileSync(join(modules, "axe-core", from), "utf8")]));

if (process.argv.includes("--check")) {
  const there = new Set(readdirSync(target));
  const wrong = [...wanted].filter(([name, text]) => !there.has(name) || readFileSync(join(target, name), "utf8") !== text);
  const extra = [...there].filter((name) => !wanted.has(name));
  wrong.push(...[...axe].filter(([name, text]) => !existsSync(join(tests, name)) || readFileSync(join(tests, name), "utf8") !== text));
  for (const [name] of wrong) console.error(`${name} differs from the pinned package; run node vendor.mjs`);
  for (const name of extra) console.error(`${name} comes from no pinned package; remove it`);
  process.exit(wrong.length + extra.length ? 1 : 0);
}
rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
for (const [name, text] of wanted) writeFileSync(join(target, name), text);
mkdirSync(tests, { recursive: true });
for (const [name, text] of axe) writeFileSync(join(tests, name), text);
console.log(`wrote ${wanted.size} files to ${target}`);
