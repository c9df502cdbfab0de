// The picker: lists of choices, and what follows from them in the data of primus show, fit and launch.
// The address keeps the choice: #model=llama3.1-8b&gpu=mi300x&precision=fp8&mode=pretrain&machines=1
"use strict";
(() => {
  const place = document.getElementById("picker");
  const data = window.PRIMUS;
  if (!place || !data) return;
  const TITLES = { model: "Model", gpu: "GPU", precision: "Precision", mode: "Mode", backend: "Backend", machines: "Machines" };
  const WORDS = { pretrain: "pretrain from scratch", full: "fine-tune all weights", lora: "fine-tune with LoRA" };
  // What fine-tuning takes besides a model: settings, and what the reader puts in place of their folders.
  const TUNING = {
    finetune: ["weights=/weights tokenizer=/weights corpus=/data save_weights=true", "the folder of the weights", "your text: a file, or a folder of files"],
    flux: ["weights=/weights corpus=/data", "diffusers’ folder “transformer”", "a folder of encoded pictures"],
  };
  const amount = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const unique = (list) => [...new Set(list)];
  const choice = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

  const ways = (upTo) => data.ways.filter((way) => ["model", "mode", "backend"].slice(0, upTo).every((key) => way[key] === choice[key]));
  const able = () => Object.keys(ways(3)[0].runs).map((key) => key.split(" "));
  // The values of each list, which depend on the lists before it.
  const LISTS = [
    ["model", () => Object.keys(data.models)],
    ["mode", () => unique(ways(1).map((way) => way.mode))],
    ["backend", () => unique(ways(2).map((way) => way.backend))],
    ["gpu", () => Object.keys(data.gpus).filter((gpu) => able().some((key) => key[1] === gpu))],
    ["precision", () => unique(able().filter((key) => key[1] === choice.gpu).map((key) => key[0]))],
    ["machines", () => data.machines.map(String)],
  ];
  const shown = { model: (name) => name, gpu: (name) => data.gpus[name].title, mode: (name) => WORDS[name], machines: (n) => `${n} × 8 GPUs` };

  const element = (name, content = "", more = {}) => Object.assign(document.createElement(name), { textContent: content }, more);
  // An element whose text has code between backticks, and links.
  function rich(name, ...parts) {
    const place = element(name);
    for (const part of parts.flatMap((part) => (typeof part === "string" ? part.split(/(`[^`]+`)/) : [part])))
      place.append(part[0] === "`" ? element("code", part.slice(1, -1), { className: "literal" }) : part);
    return place;
  }

  function draw() {
    for (const [key, values] of LISTS) {
      const options = values();
      if (!options.includes(choice[key])) choice[key] = options.includes("llama3.1-8b") ? "llama3.1-8b" : options[0];
      const list = document.getElementById(`pick-${key}`);
      list.replaceChildren(...options.map((value) => element("option", (shown[key] || String)(value), { value, selected: value === choice[key] })));
    }
    history.replaceState(null, "", `#${new URLSearchParams(choice)}`);
    document.getElementById("picked").replaceChildren(...result());
  }

  const isFit = (run) => Array.isArray(run) && run[4] !== "does not fit";

  // What runs instead of a choice that cannot: the smallest number of machines, or another precision.
  function remedy() {
    const { gpu, precision, machines } = choice, { runs } = ways(3)[0];
    const enough = data.machines.find((count) => isFit(runs[`${precision} ${gpu} ${count}`]));
    const other = unique(able().map(([name]) => name)).find((name) => isFit(runs[`${name} ${gpu} ${machines}`]));
    return [enough && `${enough} × 8 GPUs suffice`, other && `it fits in ${other}`].filter(Boolean).join("; ") || "no choice of machines here suffices";
  }

  function result() {
    const { model, gpu, precision, mode, backend, machines } = choice;
    const way = ways(3)[0], run = way.runs[`${precision} ${gpu} ${machines}`], about = data.gpus[gpu];
    if (typeof run === "string")
      return [element("p", `${model} cannot be trained this way on ${machines} × 8 GPUs: ${run}; ${remedy()}.`, { className: "bad" })];
    const [batch, all, length, gib, state, largest, error, steps] = run;
    const facts = [
      ["Model", data.models[model]],
      ["Step", length ? `${amount(batch, "sequence")} of ${length.toLocaleString("en")} tokens per GPU at a time, ${all.toLocaleString("en")} per step`
        : `${amount(batch, "image")} per GPU at a time, ${all.toLocaleString("en")} per step`],
      ["Length", rich("dd", `${amount(steps, "step")}. Add \`steps=N\`${length ? ", or \`epochs=N\` for your own text," : ""} to train longer, and \`checkpoint=N\` to save a checkpoint every N steps.`)],
      ["Memory", `${gib} GiB of ${about.gib} per GPU predicted, ± ${error} %: ${state}` + (largest ? `; the largest batch that fits is ${largest}` : "")],
      ["Measured", measured()],
      ["Validated", (way.judged ? "A small model of the same code passes every check on a CPU." : "No recorded run.")
        + (about.vendor === "amd" ? " Nothing has been run on an AMD GPU." : "")],
      ["Image", rich("dd", `\`${about.image}\` has not been published: build it with \`primus build ${gpu}\`, then \`primus load ${gpu}\`, as in the `,
        element("a", "quickstart", { href: "index.html#quickstart" }), ".")],
      ...about.issues.map((text) => ["Known issue", text]),
    ];
    const table = element("dl");
    for (const [name, text] of facts) table.append(element("dt", name), typeof text === "string" ? element("dd", text) : text);
    const fits = element("p", `${gib} of ${about.gib} GiB per GPU: ${state}${isFit(run) ? "" : `; ${remedy()}`}`, { className: state === "fits" ? "good" : "bad" });
    // What the image cannot do comes before what fits.
    const limit = isFit(run) && about.status ? [rich("p", `${about.status} `, element("a", "Locking channel amd", { href: "using.html#locking-channel-amd" }), " leads to an image that computes on the GPU.")] : [];
    return [...limit, fits, ...(isFit(run) ? commands() : []), element("h2", "What is known"), table];
  }

  function commands() {
    const { model, gpu, precision, mode, backend, machines } = choice, about = data.gpus[gpu], notes = [];
    const words = `${model} --backend ${backend} --mode ${mode} --precision ${precision} --gpu ${gpu}`;
    const multi = machines === "1" ? "" : ` --nodes ${machines}`;
    const launch = `primus launch %s ${words}${multi} --image ${about.image}`;
    const [settings, weights, text] = mode === "pretrain" ? [] : TUNING[backend], tuning = settings ? ` ${settings}` : "";
    if (settings) notes.push(rich("p", `Replace \`/weights\` by ${weights}, and \`/data\` by ${text}. On Kubernetes, both are on the volume claim.`));
    if (!multi) notes.push(rich("p", `For one GPU, add \`--ranks 1\`, if \`primus fit ${words} --ranks 1\` says that it fits.`));
    const mounts = settings ? " -v /weights:/weights:ro -v /data:/data:ro" : "";
    return [...notes, ...[
      ...(multi ? [] : [["Run it on this machine", `${data.docker[about.vendor]}${mounts} ${about.image} primus train ${words}${tuning}`]]),
      ["Slurm", launch.replace("%s", "slurm") + ` --output /shared/runs${settings ? " --mount /weights --mount /data" : ""}${tuning}`],
      ["Kubernetes", launch.replace("%s", "k8s") + ` --claim runs${tuning.replace(/=\//g, "=/workspace/runs/")}`],
    ].flatMap(([title, line]) => command(title, line))];
  }

  function measured() {
    const { model, gpu, precision, mode, backend } = choice;
    const found = data.rates.filter((one) => one.recipe === model && one.precision === precision && one.mode === mode && (one.backend === backend || one.gpu !== "h200"));
    const rows = found.filter((one) => one.gpu === gpu).concat(found.filter((one) => one.gpu !== gpu));
    if (!rows.length) return "Nobody has published a measurement of this combination.";
    const unit = (one) => (one.seq_len ? "tokens/s" : "images/s");
    const text = (one) => `${one.rate.toLocaleString("en", { maximumFractionDigits: one.seq_len ? 0 : 2 })} ${unit(one)} per GPU on ${one.gpus} × ${data.gpus[one.gpu].title}`
      + (one.seq_len ? `, ${one.batch ? `${one.batch} × ` : ""}${one.seq_len} tokens` : "") + ` (${one.by}${one.backend === backend ? "" : `, ${one.backend}`})`;
    const list = element("ul");
    list.append(...rows.slice(0, 6).map((one) => element("li", text(one))));
    const entry = element("dd");
    entry.append(list);
    return entry;
  }

  // Lines of at most 72 columns; an option stays with its value.
  function wrapped(text) {
    const lines = [""];
    for (const part of text.split(/ (?=--|-v |\w+=|rocm\/\S+ |primus train)/)) {
      if (lines.at(-1) && `${lines.at(-1)} ${part}`.length > 70) lines.push(`  ${part}`);
      else lines.push(`${lines.pop()} ${part}`.replace(/^ (?! )/, ""));
    }
    return lines.join(" \\\n");
  }

  function command(title, text) {
    const button = element("button", "Copy", { type: "button", className: "pick-copy" });
    button.setAttribute("aria-label", `Copy the command: ${title}`);
    const head = element("h2", title), block = element("pre");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch { // a page that is neither local nor from https has no clipboard
        getSelection().selectAllChildren(block);
        if (!document.execCommand("copy")) return;
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    head.append(button);
    block.tabIndex = 0;
    block.append(element("code", wrapped(text)));
    return [head, block];
  }

  const form = element("form", "", { className: "picker" });
  for (const [key] of LISTS) {
    const label = element("label", TITLES[key]), list = element("select", "", { id: `pick-${key}`, name: key });
    label.append(list);
    list.addEventListener("change", () => { choice[key] = list.value; draw(); });
    form.append(label);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  const output = element("div", "", { id: "picked" });
  output.setAttribute("aria-live", "polite");
  place.replaceChildren(form, output);
  addEventListener("hashchange", () => { Object.assign(choice, Object.fromEntries(new URLSearchParams(location.hash.slice(1)))); draw(); });
  draw();
})();
