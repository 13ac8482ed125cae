// Checks the JSDoc types of the page's modules: `npm ci && node check-types.mjs`.
//
// The modules and, in place of the vendored libraries, the short declarations of types/ are copied to
// a folder of their own, because TypeScript would read types out of minified code otherwise.
import { spawnSync } from "node:child_process";
import { cpSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const page = join(here, "..", "moe_serve", "dashboard", "static");
const copy = mkdtempSync(join(tmpdir(), "page-types-"));
try {
  for (const name of readdirSync(page)) if (name.endsWith(".js")) cpSync(join(page, name), join(copy, name));
  cpSync(join(here, "types"), join(copy, "vendor"), { recursive: true });
  const options = ["--checkJs", "--allowJs", "--noEmit", "--strict", "--noUnusedLocals", "--target", "es2023", "--module", "esnext", "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable"];
  const tsc = process.env.TSC ?? join(here, "node_modules", ".bin", "tsc");
  const done = spawnSync(tsc, [...options, join(copy, "app.js")], { stdio: "inherit", cwd: copy });
  if (done.error) console.error(`${tsc} does not run; npm ci brings it`);
  process.exitCode = done.status ?? 1;
} finally {
  rmSync(copy, { recursive: true, force: true });
}
