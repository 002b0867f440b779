// The script of a report. Text from a model or a task reaches the page only as text, through `make`.
"use strict";

const $ = id => document.getElementById(id);
const runs = JSON.parse($("data").textContent);
const several = runs.length > 1;

// An element with a class, a text and children.
function make(tag, name = "", text = "", ...children) {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  element.append(...children);
  return element;
}

// Formats a number: four digits; integers in full.
function shown(x) {
  if (typeof x !== "number") return x === null || x === undefined ? "–" : String(x);
  if (Number.isInteger(x)) return String(x);
  const short = Number(x.toPrecision(4));
  return Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

// ------------------------------------------------------------------------------------- the overview

const names = runs.map(run => run.name);
for (const run of runs) {       // folders with the same name are shown by path
  run.label = names.filter(name => name === run.name).length > 1 ? run.path : run.name;
  run.settings = run.about.config || {};
}
const colour = i => getComputedStyle(document.documentElement).getPropertyValue(`--c${i % 7}`).trim();
const last = (run, name) => run.metrics.findLast(line => line[name] !== undefined)?.[name];
const first = (run, name) => run.metrics.find(line => line[name] !== undefined)?.[name];

const fields = [...new Set(runs.flatMap(run => Object.keys(run.settings)))];
const value = (run, name) => JSON.stringify(run.settings[name]) ?? "–";
const differs = name => new Set(runs.map(run => value(run, name))).size > 1;

function overview() {
  const change = name => run => first(run, name) === undefined ? "–"
    : `${shown(first(run, name))} → ${shown(last(run, name))}`;
  const columns = {
    run: run => run.label, task: run => run.settings.task, steps: run => last(run, "step"),
    reward: change("reward"), accuracy: change("accuracy"), length: change("length"),
    "held out, greedy": change("greedy"), "held out, pass@1": change("pass@1"),
  };
  if (several) {
    const told = fields.filter(name => differs(name) && !["out", "task"].includes(name));
    columns["settings that differ"] = run => told.map(name => `${name} ${value(run, name)}`).join(", ");
  }
  $("overview").append(make("tr", "", "", ...Object.keys(columns).map(name => make("th", "", name))));
  runs.forEach((run, i) => {
    const cells = Object.values(columns).map(of => make("td", "", shown(of(run))));
    if (several) cells[0].prepend(stroke(`var(--c${i % 7})`));
    $("overview").append(make("tr", "", "", ...cells));
  });
}

// --------------------------------------------------------------------------------------- the curves

const MEANING = {
  reward: "the training reward, mean over the step's completions",
  accuracy: "share of right completions; points: on held-out problems, greedy, any of k samples (pass@k)"
    + " or most of them (maj@k)",
  length: "mean tokens per completion",
  turns: "mean turns of the policy per completion, if the task replies",
  kl: "KL to the reference, mean over tokens",
  entropy: "mean of -log pi over the sampled tokens, an estimate of the policy's entropy, in nats",
  dead_groups: "share of groups whose rewards are all equal; with a group baseline they teach nothing",
  finished: "share of completions that ended; the others were cut off, at --max_new or --max_turns",
  clip_share: "share of tokens whose gradient the clip removed, mean over optimizer steps",
  grad_norm: "gradient norm before clipping, mean over optimizer steps",
  mismatch: "largest gap between the sampler's and the trainer's log-probability of a token",
  loss: "the policy loss; about 0 by design, so watch the reward",
  value_loss: "the critic's loss",
  explained_variance: "share of the returns' variance that the critic explains: 1 is all, 0 only their mean",
  rule_reward: "the reward by the task's rule, which the learned reward replaces",
  rm_accuracy: "accuracy of the reward model on held-out labels",
  beta: "KL coefficient",
  lr: "learning rate",
  seconds: "seconds per step",
  reward_seconds: "seconds of a step spent in the task's rewards",
  rollout_tok_s: "tokens sampled per second, the time of the task's rewards left out",
  update_tok_s: "tokens trained on per second",
};
const components = new Set(runs.flatMap(run => run.samples.flatMap(g => Object.keys(g.parts))));
const meaning = name => MEANING[name] || (components.has(name)
  ? "a component of the rule's reward, mean over completions" : "not described: MEANING in run/page/page.js lacks it");
const FIRST = ["reward", "accuracy", "length", "kl", "entropy"];
const DASHES = [[], [2, 3], [8, 4], [8, 3, 2, 3], [4, 2]];
const heldOut = name => name === "greedy" || /@\d+$/.test(name);
const kOf = name => Number(name.split("@")[1] || 1);

// A line sample for a legend.
function stroke(color, dash = []) {
  const svg = "http://www.w3.org/2000/svg", box = document.createElementNS(svg, "svg");
  const line = document.createElementNS(svg, "path");
  const drawn = {d: "M0 3H24", stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") || "none"};
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  box.setAttribute("class", "stroke");
  box.append(line);
  return box;
}

// The lines of a chart: one quantity of one run each.
function linesOf(name, known) {
  const measured = known.filter(heldOut), most = Math.max(...measured.map(kOf));
  const ends = measured.filter(key => kOf(key) === 1 || !several && kOf(key) === most);
  const keys = [name, ...(name === "accuracy" ? ends : [])];
  return keys.flatMap((key, j) => runs.map((run, i) => ({
    key, run, color: several ? i : j, dash: several ? DASHES[j % 5] : [], label: several ? run.label : key,
  }))).filter(line => last(line.run, line.key) !== undefined);
}

function chart(box, name, known) {
  const lines = linesOf(name, known);
  const steps = [...new Set(lines.flatMap(({run, key}) =>
    run.metrics.filter(m => m[key] !== undefined).map(m => m.step)))].sort((a, b) => a - b);
  const columns = lines.map(({run, key}) => {
    const at = new Map(run.metrics.map(m => [m.step, m[key]]));
    return steps.map(step => at.get(step) ?? null);
  });
  const values = lines.map(({color, dash, label}) => [
    make("span", "value"), make("span", "", "", stroke(colour(color), dash), `${label} `)]);
  const where = make("span", "quiet"), keys = [...new Set(lines.map(line => line.key))];
  const together = several ? keys : [null];       // with several runs, a row per quantity
  const rows = together.map((key, n) => make("div", "", "", n ? "" : where, several && keys.length > 1 ? `${key}: ` : "",
    ...values.filter((_, i) => !several || lines[i].key === key).map(([value, label]) => (label.append(value), label))));
  const read = index => {         // the values at a step; index null: the last values
    where.textContent = index === null ? "at the end:" : `step ${steps[index]}:`;
    lines.forEach((line, i) => {
      values[i][0].textContent = shown(index === null ? last(line.run, line.key) : columns[i][index]);
    });
  };
  const place = make("div", "plot");
  const card = make("div", "chart", "", make("h3", "", name),
    make("p", "about", meaning(name)), place,
    make("div", "lines", "", ...rows));
  card.dataset.name = name;
  box.append(card);
  const axis = {stroke: getComputedStyle(document.body).color, font: "12px system-ui, sans-serif",
    grid: {stroke: "rgba(128, 128, 128, .18)", width: 1}, ticks: {show: false}};
  const plot = new uPlot({
    width: place.clientWidth, height: 190, legend: {show: false},
    cursor: {y: false, sync: {key: "steps"}}, scales: {x: {time: false}},
    axes: [{...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]},
      {...axis, size: 54, values: (u, ticks) => ticks.map(shown)}],
    series: [{}, ...lines.map(({key, color, dash}) => ({
      stroke: colour(color), width: 1.75, dash, spanGaps: true,
      points: heldOut(key) || steps.length < 3 ? {show: true, size: 7, fill: colour(color)} : {show: false}}))],
    hooks: {setCursor: [u => read(u.cursor.idx ?? null)]},
  }, [steps, ...columns], place);
  read(null);
  new ResizeObserver(() => plot.setSize({width: place.clientWidth, height: 190})).observe(place);
}

function curves() {
  const known = [...new Set(runs.flatMap(run => run.metrics.flatMap(Object.keys)))];
  const others = known.filter(name => name !== "step" && !FIRST.includes(name) && !heldOut(name));
  const order = Object.keys(MEANING);       // reward components, not listed there, come first
  others.sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const draw = (box, which) => {
    box.replaceChildren();
    which.filter(name => linesOf(name, known).length).forEach(name => chart(box, name, known));
  };
  const all = () => {
    draw($("first"), FIRST);
    if ($("more").open) draw($("more").lastElementChild, others);
  };
  all();
  $("more").addEventListener("toggle", () => $("more").open && draw($("more").lastElementChild, others));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
}

// ---------------------------------------------------------------------------------- the completions

const at = (rows, i, t) => rows?.[i]?.[t] ?? null;
const less = (a, b) => a === null || b === null ? null : a - b;
const k3 = r => r === null ? null : Math.expm1(Math.min(r, 20)) - r;
const QUANTITIES = {
  advantage: {about: "blue: the update makes it likelier; orange: less likely", both: true,
    of: (g, i, t) => at(g.advantages, i, t)},
  "log-ratio": {about: "log-probability after the update minus when sampled", both: true,
    of: (g, i, t) => less(at(g.new_logp, i, t), at(g.logp, i, t))},
  KL: {about: "to the reference, k3 of the token when sampled",
    of: (g, i, t) => k3(less(at(g.ref_logp, i, t), at(g.logp, i, t)))},
  entropy: {about: "of the distribution at this token after the update, in nats",
    of: (g, i, t) => at(g.entropy, i, t)},
  surprise: {about: "-log pi of the token when sampled, in nats",
    of: (g, i, t) => less(0, at(g.logp, i, t))},
};
const WHICH = {spread: "widest spread of rewards", random: "at random"};

for (const run of runs) {
  for (const g of run.samples) {
    const earned = g.step_rewards.flat();
    g.dead = Math.max(...earned) - Math.min(...earned) <= 1e-6 * Math.max(0.1, ...earned.map(Math.abs));
    const spoken = x => Array.isArray(x) ? x.filter((_, i) => i % 2 === 0).join("") : x;    // of turns
    g.text = [g.prompt, ...g.completions.map(spoken)].map(text => text.toLowerCase());
  }
  run.scales = {};
}
const state = {run: 0, step: null, which: "spread"};

// The value of the strongest colour, for all steps of a run: the 90th percentile.
function scaleOf(run, name) {
  if (run.scales[name] === undefined) {
    const all = [], of = QUANTITIES[name].of;
    const skip = Math.ceil(run.samples.length / 60);        // a sample is enough
    run.samples.forEach((g, n) => n % skip || g.tokens.forEach((row, i) => row.forEach((_, t) => {
      const x = of(g, i, t);
      if (x !== null) all.push(Math.abs(x));
    })));
    all.sort((a, b) => a - b);
    run.scales[name] = all[Math.floor(0.9 * all.length)] || all.at(-1) || null;
  }
  return run.scales[name];
}

const query = () => $("search").value.trim().toLowerCase();

// The groups that pass the filters, by step.
function groups() {
  const left = new Map();
  for (const g of runs[state.run].samples) {
    if ($("living").checked && g.dead || !g.text.some(text => text.includes(query()))) continue;
    left.set(g.step, [...left.get(g.step) || [], g]);
  }
  return left;
}

function options(select, labels, value) {
  select.replaceChildren(...Object.entries(labels).map(([name, label]) => {
    const option = make("option", "", label);
    option.value = name;
    return option;
  }));
  select.value = value;
}

// Show the step nearest to the chosen one among those that pass the filters.
function render() {
  $("tip").hidden = true;
  const run = runs[state.run], left = groups(), steps = [...left.keys()].sort((a, b) => a - b);
  const wanted = state.step ?? steps.at(-1);
  const step = steps.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a, steps[0]);
  const here = left.get(step) || [], index = steps.indexOf(step);
  const g = here.find(x => x.which === state.which) || here[0];
  $("step").max = Math.max(0, steps.length - 1);
  $("step").value = index;
  $("step").disabled = steps.length < 2;
  $("back").disabled = index <= 0;
  $("on").disabled = index >= steps.length - 1;
  $("at").value = g ? `${step} (${index + 1} of ${steps.length})` : "–";
  options($("which"), Object.fromEntries(here.map(x => [x.which, WHICH[x.which]])), g?.which);
  $("which").disabled = here.length < 2;
  const kept = new Set(run.samples.map(x => x.step)).size;
  $("note").textContent = (kept < run.steps ? `This page has ${kept} of ${run.steps} logged steps, evenly`
    + " spaced; all are in samples.jsonl. " : "") + (g ? "" : run.samples.length
    ? "No group matches." : "No completions have been logged yet.");
  legend(run);
  $("group").replaceChildren(...(g ? groupOf(g, run) : []));
  state.steps = steps;
  state.index = index;
  state.group = g;
}

function legend(run) {
  const name = $("colour").value, {both, about} = QUANTITIES[name], most = scaleOf(run, name);
  if (most === null) {
    $("legend").replaceChildren(`${name}: not available for this run.`);
    return;
  }
  $("legend").replaceChildren(make("span", "", both ? `≤ ${shown(-most)}` : "0"), make("span", both ? "bar both" : "bar one"),
    make("span", "", `≥ ${shown(most)}`), make("span", "quiet", `${name}: ${about}. Point at or tap a token for its numbers.`));
}

function groupOf(g, run) {
  const steps = g.ends.some(ends => ends.length > 1);
  const mean = g.rewards.reduce((a, b) => a + b, 0) / g.rewards.length, word = query();
  const order = g.rewards.map((_, i) => i).sort((a, b) => g.rewards[b] - g.rewards[a]);
  const inPrompt = g.text[0].includes(word);
  const seen = order.filter(i => inPrompt || g.text[i + 1].includes(word));
  const about = `${g.rewards.length} completions, mean reward ${shown(mean)}`
    + (seen.length < order.length ? `; ${seen.length} with “${$("search").value.trim()}”` : "")
    + (g.dead ? "; a dead group: all rewards are equal, so with a group baseline it teaches nothing" : "")
    + ". The highest reward comes first."
    + (steps ? " A framed number is the reward of the step that ends before it." : "");
  return [make("pre", "prompt", g.prompt), make("p", "quiet", about),
    make("div", "cards", "", ...seen.map(i => card(g, i, run, steps)))];
}

function card(g, i, run, steps) {
  const head = make("header", "", "", make("span", "reward", `reward ${shown(g.rewards[i])}`));
  for (const [name, values] of Object.entries(g.parts)) {
    head.append(make("span", "", `${name} ${shown(values[i])}`));
  }
  head.append(make("span", g.finished[i] ? "badge" : "badge cut", g.finished[i] ? "finished" : "cut"));
  head.append(make("span", "", `${g.tokens[i].length} tokens`));
  const text = make("pre", "text"), {of, both} = QUANTITIES[$("colour").value];
  const most = scaleOf(run, $("colour").value), marked = found(g, i);
  const replies = g.replies?.[i] || [];                   // the number of tokens before each that is not given
  g.tokens[i].forEach((piece, t) => {
    const reply = replies.indexOf(t);
    if (reply >= 0) text.append(make("span", "reply", g.completions[i].at(2 * (reply - replies.length))));
    const label = piece || (g.finished[i] && t === g.tokens[i].length - 1 ? "⟨end⟩" : "·");
    const token = make("span", piece ? "tok" : "tok mark", label.replaceAll("\n", "↵\n").replace(/\n$/, ""));
    const x = of(g, i, t);
    if (x !== null && most) {
      const hue = both ? (x > 0 ? "--plus" : "--minus") : "--much";
      token.style.background = `rgb(var(${hue}) / calc(var(--deep) * ${Math.min(1, Math.abs(x) / most).toFixed(3)}))`;
    }
    if (marked.has(t)) token.classList.add("found");
    token.dataset.at = `${i} ${t}`;
    text.append(token);
    const step = steps ? g.ends[i].indexOf(t) : -1;
    if (step >= 0) text.append(make("span", "step", shown(g.step_rewards[i][step])));
    if (piece.endsWith("\n")) text.append("\n");
  });
  return make("article", "card", "", head, text);
}

// The tokens that contain the searched text.
function found(g, i) {
  const marked = new Set(), word = query();
  for (let at = word ? g.text[i + 1].indexOf(word) : -1; at >= 0; at = g.text[i + 1].indexOf(word, at + 1)) {
    let begin = 0;
    g.tokens[i].forEach((piece, t) => {
      if (begin < at + word.length && begin + piece.length > at) marked.add(t);
      begin += piece.length;
    });
  }
  return marked;
}

// A tooltip with the numbers of the token under the pointer.
function point(event) {
  const token = event.target.closest?.(".tok"), tip = $("tip"), g = state.group;
  tip.hidden = !token;
  if (!token) return;
  const [i, t] = token.dataset.at.split(" ").map(Number), rows = {token: JSON.stringify(g.tokens[i][t])};
  rows.place = `${t + 1} of ${g.tokens[i].length}`;
  for (const [name, {of}] of Object.entries(QUANTITIES)) rows[name] = shown(of(g, i, t));
  const logp = at(g.logp, i, t);
  rows.probability = logp === null ? "–" : `${shown(Math.exp(logp))} → ${shown(Math.exp(at(g.new_logp, i, t) ?? logp))}`;
  tip.replaceChildren(make("table", "", "", ...Object.entries(rows).map(([name, value]) =>
    make("tr", "", "", make("th", "", name), make("td", "", value)))));
  const spot = token.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = spot.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(spot.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? spot.bottom + 6 : Math.max(8, spot.top - size.height - 6)}px`;
}

function completions() {
  if (!runs.some(run => run.samples.length)) {
    $("rollouts").hidden = true;
    return;
  }
  options($("run"), Object.fromEntries(runs.map((run, i) => [i, run.label])), 0);
  options($("colour"), Object.fromEntries(Object.keys(QUANTITIES).map(name => [name, name])), "advantage");
  $("runs").hidden = !several;
  const go = index => { state.step = state.steps[index]; render(); };
  $("step").addEventListener("input", () => go($("step").value));
  $("back").addEventListener("click", () => go(state.index - 1));
  $("on").addEventListener("click", () => go(state.index + 1));
  $("run").addEventListener("change", () => { state.run = Number($("run").value); render(); });
  $("which").addEventListener("change", () => { state.which = $("which").value; render(); });
  for (const [id, event] of [["colour", "change"], ["living", "change"], ["search", "input"]]) {
    $(id).addEventListener(event, render);
  }
  for (const event of ["pointerover", "click"]) document.addEventListener(event, point);
  document.addEventListener("scroll", () => { $("tip").hidden = true; }, true);
  render();
}

// ------------------------------------------------------------------------------------- the settings

function settings() {
  const table = document.querySelector("#settings table");
  fields.sort((a, b) => differs(b) - differs(a));         // settings that differ between runs come first
  table.append(make("tr", "", "", make("th"), ...runs.map(run => make("th", "", run.label))));
  for (const name of fields) {
    table.append(make("tr", differs(name) ? "differs" : "", "", make("td", "", name),
      ...runs.map(run => make("td", "", value(run, name)))));
  }
  table.append(make("tr", "", "", make("td", "", "versions"),
    ...runs.map(run => make("td", "", Object.entries(run.about.versions || {}).map(x => x.join(" ")).join(", ")))));
  table.append(make("tr", "", "", make("td", "", "command"),
    ...runs.map(run => make("td", "", [].concat(run.about.command ?? []).join(" ")))));
}

document.title = runs.map(run => run.label).join(", ");
if (!several) document.querySelector("h1").textContent = `The run ${runs[0].label}`;
overview();
curves();
completions();
settings();
