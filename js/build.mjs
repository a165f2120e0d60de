// Builds one bundle per widget into mlx_jupyter/widgets/static. Each starts with a banner that holds
// the hash of everything it was made from, so that staleness can be seen without Node (the Python
// tests do). `--check` builds in memory and fails if what is committed differs.

import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "mlx_jupyter", "widgets", "static");
const widgets = ["trie", "pages"];

/** sha256 over the sources, the lock file and this script: name, NUL, text with LF, NUL each. */
function sourceHash() {
  const sources = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) =>
      join(entry.parentPath, entry.name)
        .slice(here.length + 1)
        .replaceAll("\\", "/"),
    );
  const hash = createHash("sha256");
  for (const name of [...sources, "build.mjs", "package-lock.json"].sort()) {
    const text = readFileSync(join(here, name), "utf8").replaceAll("\r\n", "\n");
    hash.update(`${name}\0${text}\0`);
  }
  return hash.digest("hex");
}

const banner = `/* mlx-jupyter, built from js/ ${sourceHash()}; third-party notices in THIRD_PARTY_NOTICES.md */`;
const { outputFiles } = await build({
  absWorkingDir: here,
  entryPoints: widgets.flatMap((name) => [`src/${name}.ts`, `src/${name}.css`]),
  outdir: target,
  write: false,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022", "chrome111", "firefox115", "safari16.4"],
  legalComments: "none",
  charset: "utf8",
  banner: { js: banner, css: banner },
});

if (process.argv.includes("--check")) {
  const committed = (file) => {
    try {
      return readFileSync(file.path, "utf8").replaceAll("\r\n", "\n");
    } catch {
      return "";
    }
  };
  const stale = outputFiles.filter((file) => committed(file) !== file.text);
  for (const file of stale) {
    console.error(`${basename(file.path)} is stale: run "npm run build" and commit it`);
  }
  process.exit(stale.length ? 1 : 0);
}

mkdirSync(target, { recursive: true });
for (const file of outputFiles) {
  writeFileSync(file.path, file.text);
  console.log(`${basename(file.path)}  ${(file.contents.length / 1000).toFixed(1)} kB`);
}
