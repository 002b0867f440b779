// The script of a report. Text of a model or a task reaches the page only as text, through `make`.
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

function options(select, labels) {
  for (const [name, label] of Object.entries(labels)) {
    select.append(make("option", "", label));
    select.lastChild.value = name;
  }
}

const heldOut = name => /^greedy$|@\d+$/.test(name);
const SHARES = ["accuracy", "finished", "dead_groups", "clip_share", "rm_accuracy"];
const isShare = name => heldOut(name) || SHARES.includes(name);

// Formats a number: a share in per cent, as in the terminal (1/16: 6.2%); four digits; integers.
function shown(x, name = "") {
  if (typeof x !== "number") return String(x ?? "–");
  if (isShare(name)) return `${(100 * x - (100 * x % 1 === 0.25) / 100).toFixed(1)}%`;
  if (Number.isInteger(x)) return String(x);
  const short = Number(x.toPrecision(4));
  return Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

// ------------------------------------------------------------------------------------ the overview

for (const run of runs) {       // folders with the same name are shown by path
  run.label = runs.some(x => x !== run && x.name === run.name) ? run.path : run.name;
  run.settings = run.about.config || {};
}
const style = getComputedStyle(document.documentElement);
const colour = i => style.getPropertyValue(`--c${i % 7}`).trim();
const measured = (run, name) => run.metrics.filter(line => line[name] !== undefined);
const last = (run, name) => measured(run, name).at(-1)?.[name];

// The first and the last value of a statistic.
function change(run, name) {
  const all = measured(run, name), ends = all.length > 1 ? [all[0], all.at(-1)] : all;
  return ends.map(line => shown(line[name], name)).join(" → ") || "–";
}

// Wilson's 95 % interval of the pass@1 in a line of the metrics; null without number of problems.
function intervalOf(run, line = measured(run, "pass@1").at(-1)) {
  const p = line?.["pass@1"], n = line?.held_out || run.settings.held_out, z = 1.96;
  if (typeof p !== "number" || !(n > 0)) return null;
  const middle = p + z * z / (2 * n);
  const half = z * Math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2);
  return [middle - half, middle + half].map(x => Math.max(0, x / (1 + z * z / n)));
}

const fields = [...new Set(runs.flatMap(run => Object.keys(run.settings)))];
const differs = name => new Set(runs.map(run => value(run, name))).size > 1;

function value(run, name) {
  const x = run.settings[name];
  return typeof x === "object" ? JSON.stringify(x) : x ?? "–";
}

function figure(label, text, interval, more = "") {
  const ends = interval?.map(x => shown(x, "pass@1")).join(" to ");
  const box = make("div", "", "", make("span", "quiet", label), make("strong", "", text),
    make("span", "quiet", (ends ? `95% interval ${ends}` : "") + more));
  if (interval) box.title = "Wilson's, over the held-out problems; seeds may differ by more";
  $("figures").append(box);
}

function overview() {
  const [run] = runs, told = name => `${name} ${change(run, name)}`;
  const earned = known.includes("rule_reward") ? ["rule_reward", "reward"] : ["reward"];
  figure("held out, greedy", change(run, "greedy"));
  figure("held out, pass@1", change(run, "pass@1"), intervalOf(run));
  figure(`${earned[0]} in training`, change(run, earned[0]));
  $("about").textContent = `task ${value(run, "task")}, ${last(run, "step")} steps, `
    + ["accuracy", "length", ...earned.slice(1)].map(told).join(", ");
}

// The best of several runs, and a table of all, sorted by the column that one clicks on.
function comparison() {
  const score = run => last(run, "pass@1") ?? -1;
  const best = runs.reduce((a, b) => score(b) > score(a) ? b : a);
  const interval = intervalOf(best);
  const near = runs.filter(run => run !== best && interval && score(run) >= interval[0]);
  const title = `best pass@1: ${best.label}`;
  const note = near.length ? `; perhaps no worse: ${near.map(run => run.label).join(", ")}` : "";
  if (score(best) >= 0) figure(title, shown(score(best), "pass@1"), interval, note);
  const idle = runs.some(run => run.settings.init) ? ["warm_steps", "warm_lr"] : [];
  const hidden = ["out", "steps", ...idle];
  const differing = fields.filter(name => differs(name) && !hidden.includes(name));
  const numbers = ["pass@1", "greedy", "reward", "accuracy", "length"];
  const columns = [
    {name: "run", of: run => run.label},
    ...differing.map(name => ({name, of: run => value(run, name)})),
    ...numbers.map(name => ({name, of: run => last(run, name), text: run => change(run, name)})),
    {name: "steps", of: run => last(run, "step")},
  ];
  const rows = runs.map((run, i) => {
    const cells = columns.map(({of, text = of}) => make("td", "", shown(text(run))));
    cells[0].prepend(stroke(`var(--c${i % 7})`));
    if (run === best) cells[1 + differing.length].className = "best";
    return make("tr", "", "", ...cells);
  });
  const heads = columns.map(({name}) => make("th", "", "", make("button", "", name)));
  const sort = n => {
    const way = heads[n].ariaSort === "descending" ? 1 : -1;
    heads.forEach(head => { head.ariaSort = null; });
    heads[n].ariaSort = way > 0 ? "ascending" : "descending";
    const keys = runs.map(run => columns[n].of(run) ?? -Infinity);
    const order = (i, j) => way * ((keys[i] > keys[j]) - (keys[i] < keys[j]));
    $("overview").append(...[...rows.keys()].sort(order).map(i => rows[i]));
  };
  heads.forEach((head, n) => head.firstChild.addEventListener("click", () => sort(n)));
  $("overview").append(make("tr", "", "", ...heads));
  sort(1 + differing.length);
}

// -------------------------------------------------------------------------------------- the curves

const MEANING = {
  reward: "the training reward, by the rule or learned, mean over the step's completions",
  accuracy: "share of right completions" + (several ? "" : "; points: held-out problems, greedy,"
    + " any of k (pass@k), or most of k samples (maj@k)"),
  length: "mean tokens per completion",
  turns: "mean turns of the policy per completion, if the task replies",
  kl: "KL to the reference, mean over tokens",
  entropy: "mean of -log pi over the sampled tokens, an estimate of the policy's entropy, in nats",
  finished: "share of completions that ended; the others were cut off, at --max_new or --max_turns",
  dead_groups: "share of groups with equal rewards; with a group baseline they teach nothing",
  clip_share: "share of tokens whose gradient the clip removed, mean over optimizer steps",
  grad_norm: "gradient norm before clipping, mean over optimizer steps",
  mismatch: "largest gap between the sampler's and the trainer's log-probability of a token",
  loss: "the policy loss; it says nothing about progress: watch the reward",
  value_loss: "the critic's loss",
  explained_variance: "share of the returns' variance that the critic explains",
  rule_reward: "the reward by the task's rule, which the learned reward replaces",
  rm_accuracy: "accuracy of the reward model on held-out labels",
  beta: "KL coefficient",
  lr: "learning rate",
  seconds: "seconds per step",
  reward_seconds: "seconds of a step spent in the task's rewards",
  rollout_tok_s: "tokens sampled per second, the time of the task's rewards left out",
  update_tok_s: "tokens trained on per second",
  "pass@1": "share of right samples on held-out problems, with its 95% interval",
};
const OWN = "part of the rule's reward, or a statistic of your own (see MEANING in run/page/page.js)";
const known = [...new Set(runs.flatMap(run => run.metrics.flatMap(Object.keys)))];
const FIRST = ["reward", "rule_reward", "accuracy", ...(several ? ["pass@1"] : []), "length",
  "kl", "entropy", "finished", "dead_groups"];
const DOTTED = [2, 4];
const kOf = name => Number(name.split("@")[1] || 1);
const TICKS = [-3, -2, -1, 0, 1, 2, 3, 4, 5, 6].flatMap(e => [1, 2, 5].map(x => x * 10 ** e));

// What the horizontal axis may be: a number for each line of the metrics.
const AXES = {
  step: run => run.metrics.map(line => line.step),
  completions: run => AXES.step(run).map(n => n * run.settings.prompts * run.settings.group),
  minutes: (run, sum = 0) => run.metrics.map(line => (sum += line.seconds || 0) / 60),
};

// A line sample for a legend.
function stroke(color, dash = []) {
  const svg = "http://www.w3.org/2000/svg", box = document.createElementNS(svg, "svg");
  const line = box.appendChild(document.createElementNS(svg, "path"));
  line.setAttribute("d", "M0 3H24");
  line.setAttribute("style", `stroke: ${color}; stroke-width: 2.5; stroke-dasharray: ${dash}`);
  box.setAttribute("class", "stroke");
  return box;
}

// The lines of a chart: a quantity of each run; of one run the held-out shares beside accuracy.
function linesOf(name) {
  const shares = known.filter(heldOut), most = Math.max(...shares.map(kOf));
  const ends = shares.filter(key => [1, most].includes(kOf(key)));
  const keys = [name, ...(name === "accuracy" && !several ? ends : [])];
  return keys.flatMap((key, j) => runs.map((run, i) => ({
    key, run, color: colour(several ? i : j), label: several ? run.label : key,
  }))).filter(line => last(line.run, line.key) !== undefined);
}

function chart(box, name) {
  const lines = linesOf(name), axis = $("axis").value;
  const places = [...new Set(runs.flatMap(run => run.x))].sort((a, b) => a - b);
  const columns = lines.map(({run, key}) => {
    const at = new Map(run.metrics.map((line, n) => [run.x[n], line[key]]));
    return places.map(x => at.get(x) ?? null);
  });
  const bars = lines.filter(({key}) => key === "pass@1").flatMap(({run, color}) =>
    run.metrics.map((line, n) => ({x: run.x[n], color, ends: intervalOf(run, line) || []})));
  const values = lines.map(() => make("span", "value"));
  const where = make("span", "quiet"), legend = make("div", "lines", "", where,
    ...lines.map(({key, color, label}, i) =>
      make("span", "", "", stroke(color, heldOut(key) ? DOTTED : []), `${label} `, values[i])));
  const read = index => {         // the values at a place; index null: the last values
    where.textContent = index === null ? "at the end:" : `${axis} ${shown(places[index])}:`;
    lines.forEach(({run, key}, i) => {
      values[i].textContent = shown(index === null ? last(run, key) : columns[i][index], key);
    });
  };
  const range = (_, low, high) => {       // of the vertical axis
    if (!low && !high) return [0, 1];
    const all = [low, high, ...bars.flatMap(bar => bar.ends)];
    const [from, to] = uPlot.rangeNum(Math.min(...all), Math.max(...all), 0.1, true);
    return isShare(name) ? [Math.max(0, Math.min(from, 0.95)), Math.min(1, to)] : [from, to];
  };
  const draw = plot => bars.forEach(({x, color, ends}) => {
    if (x < plot.scales.x.min || x > plot.scales.x.max) return;
    Object.assign(plot.ctx, {strokeStyle: color, lineWidth: 2 * devicePixelRatio});
    plot.ctx.beginPath();
    ends.forEach(y => plot.ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)));
    plot.ctx.stroke();
  });
  const place = make("div");
  box.append(make("div", "chart", "", make("h3", "", name), place, legend,
    make("p", "quiet", MEANING[name] ?? OWN)));
  const both = {stroke: style.color, font: "12px system-ui, sans-serif",
    grid: {stroke: "rgba(128, 128, 128, .18)", width: 1}, ticks: {show: false}};
  const plot = new uPlot({
    width: place.clientWidth, height: 190, legend: {show: false},
    cursor: {y: false, sync: {key: "x"}}, scales: {x: {time: false}, y: {range}},
    axes: [{...both, size: 28, incrs: TICKS.filter(x => axis === "minutes" || x >= 1)},
      {...both, size: 54, ...(isShare(name) ? {incrs: TICKS} : {}),
        values: (_, ticks) => ticks.map(x => shown(x, name).replace(".0%", "%"))}],
    series: [{}, ...lines.map(({run, key, color}) => ({
      stroke: color, width: 1.75, dash: heldOut(key) ? DOTTED : [], spanGaps: true,
      points: {show: heldOut(key) || measured(run, key).length < 3, size: 7, fill: color}}))],
    hooks: {setCursor: [({cursor}) => read(cursor.idx ?? null)], draw: [draw]},
  }, [places, ...columns], place);
  read(null);
  new ResizeObserver(() => plot.setSize({width: place.clientWidth, height: 190})).observe(place);
}

function curves() {
  const order = Object.keys(MEANING);       // reward components, not listed there, come first
  const others = known.filter(name => !["step", "held_out", ...FIRST].includes(name)
    && !heldOut(name)).sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const draw = (box, which) => {
    box.replaceChildren();
    which.filter(name => linesOf(name).length).forEach(name => chart(box, name));
  };
  const all = () => {
    for (const run of runs) run.x = AXES[$("axis").value](run);
    draw($("first"), FIRST);
    draw($("more").lastElementChild, $("more").open ? others : []);
  };
  const grows = name => runs.every(run => AXES[name](run).at(-1) > 0);
  const axes = Object.keys(AXES).filter(name => name === "step" || grows(name));
  options($("axis"), Object.fromEntries(axes.map(name => [name, name])));
  all();
  $("axis").addEventListener("input", all);
  $("more").addEventListener("toggle", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
}

// --------------------------------------------------------------------------------- the completions

const at = (rows, i, t) => rows?.[i]?.[t] ?? null;
const less = (a, b) => a === null || b === null ? null : a - b;
const k3 = r => r === null ? null : Math.expm1(Math.min(r, 20)) - r;
const QUANTITIES = {
  advantage: {about: "blue: the update raises its probability; orange: lowers it", both: true,
    of: (g, i, t) => at(g.advantages, i, t)},
  "log-ratio": {about: "log-probability after the update minus when sampled", both: true,
    of: (g, i, t) => less(at(g.new_logp, i, t), at(g.logp, i, t))},
  KL: {about: "to the reference, k3 of the token when sampled",
    of: (g, i, t) => k3(less(at(g.ref_logp, i, t), at(g.logp, i, t)))},
  entropy: {about: "of the distribution at this token after the update, in nats",
    of: (g, i, t) => at(g.entropy, i, t)},
};
const WHICH = {spread: "widest spread of rewards", random: "at random"};

for (const run of runs) {
  for (const g of run.samples) {
    const earned = g.step_rewards.flat(), most = Math.max(0.1, ...earned.map(Math.abs));
    g.dead = Math.max(...earned) - Math.min(...earned) <= 1e-6 * most;
    const spoken = x => Array.isArray(x) ? x.filter((_, i) => i % 2 === 0).join("") : x;
    g.text = [g.prompt, ...g.completions.map(spoken)].map(text => text.toLowerCase());
  }
  run.scales = {};
}
const state = {step: null};

// The value of the strongest colour, for all steps of a run: the 90th percentile.
function scaleOf(run, name) {
  const {of} = QUANTITIES[name];
  const values = g => g.tokens.flatMap((row, i) => row.map((_, t) => of(g, i, t)));
  const all = run.scales[name] ??= run.samples.flatMap(values).filter(x => x !== null)
    .map(Math.abs).sort((a, b) => a - b);
  return all[Math.floor(0.9 * all.length)] || all.at(-1);
}

// Colours by a value: its strength is the square root, so that small ones can be seen.
function tint(element, x, most, both) {
  const hue = both ? (x > 0 ? "--plus" : "--minus") : "--much";
  const strength = Math.sqrt(Math.min(1, Math.abs(x) / most)).toFixed(3);
  element.style.background = `rgb(var(${hue}) / calc(var(--deep) * ${strength}))`;
}

const query = () => $("search").value.trim().toLowerCase();

// Show the step nearest to the chosen one among those that pass the filters.
function render() {
  $("tip").hidden = true;
  const run = runs[$("run").value], word = query();
  const left = run.samples.filter(g => !($("living").checked && g.dead)
    && g.text.some(text => text.includes(word)));
  const steps = [...new Set(left.map(g => g.step))].sort((a, b) => a - b);
  const wanted = state.step ?? steps.at(-1), gap = step => Math.abs(step - wanted);
  const step = steps.reduce((a, b) => gap(b) < gap(a) ? b : a, steps[0]);
  const here = left.filter(g => g.step === step), index = steps.indexOf(step);
  const g = here.find(x => x.which === $("which").value) || here[0];
  $("step").max = Math.max(0, steps.length - 1);
  $("step").value = index;
  $("back").disabled = index <= 0;
  $("on").disabled = index >= steps.length - 1;
  $("at").value = g ? `${step} (${index + 1} of ${steps.length})` : "–";
  const kept = new Set(run.samples.map(x => x.step)).size;
  $("note").textContent = (kept < run.steps ? `This page has ${kept} of ${run.steps} logged steps,`
    + " evenly spaced; all are in samples.jsonl. " : "") + (g ? "" : "There is no such group.");
  legend(run);
  $("group").replaceChildren(...(g ? groupOf(g, run) : []));
  Object.assign(state, {steps, index, group: g});
}

function legend(run) {
  const name = $("colour").value, {both, about} = QUANTITIES[name], most = scaleOf(run, name);
  const none = most === 0 ? "0 in every logged token" : "not available for this run";
  const bar = make("span", "bar");
  for (let x = both ? -1 : 0; x <= 1; x += 0.125) tint(bar.appendChild(make("span")), x, 1, both);
  $("legend").replaceChildren(...!most ? [`${name}: ${none}.`] : [
    both ? `≤ ${shown(-most)}` : "0", bar, `≥ ${shown(most)}`,
    make("span", "quiet", `${name}: ${about}. Point at or tap a token for its numbers.`)]);
}

// A prompt; of a long one the beginning, which opens to the whole.
function promptOf(text) {
  const begin = text.split("\n").slice(0, 4).join("\n").slice(0, 300);
  if (begin === text) return make("pre", "prompt", text);
  return make("details", "prompt", "", make("summary", "", "", make("pre", "", `${begin} …`)),
    make("pre", "", text));
}

function groupOf(g, run) {
  const steps = g.ends.some(ends => ends.length > 1), word = query();
  const mean = g.rewards.reduce((a, b) => a + b, 0) / g.rewards.length;
  const order = g.rewards.map((_, i) => i).sort((a, b) => g.rewards[b] - g.rewards[a]);
  const seen = order.filter(i => g.text[0].includes(word) || g.text[i + 1].includes(word));
  const alike = {};         // the rows of equal completions, of which the first is shown
  for (const i of seen) {
    const key = JSON.stringify([g.completions[i], g.tokens[i], g.finished[i], g.rewards[i]]);
    (alike[key] ??= []).push(i);
  }
  const about = [`${g.rewards.length} completions, mean reward ${shown(mean)}`];
  if (seen.length < order.length) about.push(`${seen.length} with “${$("search").value.trim()}”`);
  if (g.dead) about.push("a dead group: with a group baseline equal rewards teach nothing");
  if (steps) about.push("a framed number is the reward of the step that ends before it");
  return [promptOf(g.prompt), "answer" in g ? make("pre", "", `right answer: ${g.answer}`) : "",
    make("p", "quiet", `${WHICH[g.which]}: ${about.join("; ")}.`), make("div", "cards", "",
      ...Object.values(alike).map(same => card(g, same[0], same.length, run, steps)))];
}

function card(g, i, count, run, steps) {
  const head = make("header", "", "", count > 1 ? make("b", "", `${count}x`) : "",
    make("b", "", `reward ${shown(g.rewards[i])}`),
    ...Object.entries(g.parts).map(([name, x]) => make("span", "", `${name} ${shown(x[i])}`)),
    g.finished[i] ? make("span", "badge", "finished") : make("span", "badge cut", "cut"),
    make("span", "", `${g.tokens[i].length} tokens`));
  const text = make("pre", "text"), {of, both} = QUANTITIES[$("colour").value], word = query();
  const most = scaleOf(run, $("colour").value);
  const replies = g.replies?.[i] || [];       // the number of tokens before each that is not given
  let begin = 0;
  g.tokens[i].forEach((piece, t) => {
    const reply = replies.indexOf(t), x = of(g, i, t), end = begin + piece.length;
    if (reply >= 0) {
      text.append(make("span", "reply", g.completions[i].at(2 * (reply - replies.length))));
    }
    const isEnd = g.finished[i] && t === g.tokens[i].length - 1;
    const label = piece.replaceAll("\n", "↵\n").replace(/\n$/, "") || (isEnd ? "⟨end⟩" : "·");
    const token = make("span", piece ? "tok" : "tok mark", label);
    if (x !== null && most) tint(token, x, most, both);
    const match = g.text[i + 1].indexOf(word, begin - word.length + 1);
    if (word && match >= 0 && match < end) token.classList.add("found");
    begin = end;
    token.dataset.at = `${i} ${t}`;
    text.append(token);
    const step = steps ? g.ends[i].indexOf(t) : -1;
    if (step >= 0) text.append(make("span", "step", shown(g.step_rewards[i][step])));
    if (piece.endsWith("\n")) text.append("\n");
  });
  return make("article", "card", "", head, text);
}

// A tooltip with the numbers of the token under the pointer.
function point(event) {
  const token = event.target.closest?.(".tok"), tip = $("tip"), g = state.group;
  tip.hidden = !token;
  if (!token) return;
  const [i, t] = token.dataset.at.split(" ").map(Number);
  const rows = {token: JSON.stringify(g.tokens[i][t]), place: `${t + 1} of ${g.tokens[i].length}`};
  for (const [name, {of}] of Object.entries(QUANTITIES)) rows[name] = shown(of(g, i, t));
  const logp = at(g.logp, i, t), after = at(g.new_logp, i, t) ?? logp;
  rows.probability = logp === null ? "–" : `${shown(Math.exp(logp))} → ${shown(Math.exp(after))}`;
  tip.replaceChildren(make("table", "", "", ...Object.entries(rows).map(([name, value]) =>
    make("tr", "", "", make("th", "", name), make("td", "", value)))));
  const spot = token.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = spot.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(spot.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? spot.bottom + 6 : Math.max(8, spot.top - size.height - 6)}px`;
}

function completions() {
  options($("run"), runs.map(run => run.label));
  options($("which"), WHICH);
  options($("colour"), Object.fromEntries(Object.keys(QUANTITIES).map(name => [name, name])));
  $("runs").hidden = !several;
  $("rollouts").hidden = !runs.some(run => run.samples.length);
  const go = index => { state.step = state.steps[index]; render(); };
  $("step").addEventListener("input", () => go($("step").value));
  $("back").addEventListener("click", () => go(state.index - 1));
  $("on").addEventListener("click", () => go(state.index + 1));
  for (const id of ["run", "which", "colour", "living", "search"]) {
    $(id).addEventListener("input", render);
  }
  for (const event of ["pointerover", "click"]) document.addEventListener(event, point);
  document.addEventListener("scroll", () => { $("tip").hidden = true; }, true);
  render();
}

// ------------------------------------------------------------------------------------ the settings

function settings() {
  const row = (name, of, mark = "") => $("settings").querySelector("table").append(make("tr", mark,
    "", make("td", "", name), ...runs.map(run => make("td", "", String(of(run))))));
  row("", run => run.label);
  fields.sort((a, b) => differs(b) - differs(a));       // those that differ come first
  for (const name of fields) row(name, run => value(run, name), differs(name) ? "differs" : "");
  row("versions", run => Object.entries(run.about.versions || {}).map(x => x.join(" ")).join(", "));
  row("command", run => [].concat(run.about.command ?? []).join(" "));
}

document.title = runs.map(run => run.label).join(", ");
if (!several) document.querySelector("h1").textContent = `The run ${runs[0].label}`;
(several ? comparison : overview)();
curves();
completions();
settings();
