// Says whether each dashboard is one by the types that Grafana publishes: compiles
// `const dashboard: Dashboard = {...}` for every file that is named, and prints what tsc says.
import { readFileSync } from "node:fs";
import { basename } from "node:path";
import ts from "typescript";

// TypeScript keeps a text from being a member of an enumeration; in JSON it is nothing else.
const HEAD = `import type { Dashboard } from "@grafana/schema";
type Plain<T> = T extends string ? \`\${T}\` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
`;

const files = process.argv.slice(2);
const texts = new Map(
  files.map((file) => [
    `${import.meta.dirname}/${basename(file)}.ts`,
    `${HEAD}export const dashboard: Plain<Dashboard> = ${readFileSync(file, "utf-8")};\n`,
  ]),
);
const options = {
  strict: true,
  noEmit: true,
  skipLibCheck: true,
  types: [],
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  target: ts.ScriptTarget.ES2022,
};
const host = ts.createCompilerHost(options);
const { fileExists, readFile, getSourceFile } = host;
host.fileExists = (name) => texts.has(name) || fileExists(name);
host.readFile = (name) => texts.get(name) ?? readFile(name);
host.getSourceFile = (name, languageVersion, ...rest) =>
  texts.has(name)
    ? ts.createSourceFile(name, texts.get(name), languageVersion)
    : getSourceFile(name, languageVersion, ...rest);

const program = ts.createProgram([...texts.keys()], options, host);
const found = ts.getPreEmitDiagnostics(program);
process.stdout.write(ts.formatDiagnostics(found, { getCanonicalFileName: (name) => name, getCurrentDirectory: () => import.meta.dirname, getNewLine: () => "\n" }));
process.exitCode = found.length > 0 || files.length === 0 ? 1 : 0;
