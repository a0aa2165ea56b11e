// The live page: prompt -> ids -> stream of tokens -> text that shows what each token read.
//
//   tokens    [{id, text, logprob, top: [{id, text, logprob}], trace, made, element}], the whole text;
//             the model wrote those with `made`
//   prompt    the ids that the last request continues; their tokens come back with its answer
//   start     how many they are
//   choice    {layer, head} whose weights are shown; null is the mean
//   active    the token under the pointer or the focus, else the one that was kept, else null
//
// Every text of the server becomes a text node. Functions of charts.js and attention_map.js are in scope.

const { facts, policy, recording } = JSON.parse(document.getElementById("data").textContent);
const pristine = document.body.cloneNode(true), find = (id) => document.getElementById(id);
const LEAST = 0.005, NATS = 8, ALTERNATIVES = 10, TOP = 8, WEIGHTS = 1 << 14, EVERY_HEAD = 1 << 8;

const CONTROLS = [
	{ name: "temperature", label: "Temperature", low: 0, high: 2, step: 0.01, value: 0.8, about: "0 takes the likeliest token" },
	{ name: "top_p", label: "Top p", low: 0.05, high: 1, step: 0.01, value: 1, about: "the likeliest tokens with this mass" },
	{ name: "top_k", label: "Top k", low: 0, high: 200, step: 1, value: 0, about: "the likeliest k tokens; 0 is all" },
	{ name: "min_p", label: "Min p", low: 0, high: 1, step: 0.01, value: 0, about: "share of the likeliest token's probability" },
	{ name: "repetition_penalty", label: "Repetition penalty", low: 1, high: 2, step: 0.01, value: 1, about: "1 is none" },
	{ name: "max_tokens", label: "New tokens", low: 1, high: Math.min(facts.context ?? 256, 512), step: 1, value: Math.min(facts.context ?? 256, 96), about: "at most" },
	{ name: "seed", label: "Seed", low: 0, high: 2 ** 31 - 1, step: 1, value: 0, number: true, about: "the same seed draws the same tokens" },
];

// Directions by the names that the server has for them; 1 is the strength of the file.
const DIRECTIONS = Object.entries(facts.directions ?? {}).map(([name, strength]) => ({ name, unit: strength || 1, label: `Direction ${name}`, low: -3, high: 3, step: 0.05, value: strength ? 1 : 0, about: "0 is none, below 0 the other way" }));
const BUDGET = { name: "token_kl", label: "Budget per token", low: 0, high: 1, step: 0.01, value: 0, about: "nats from the unsteered model; 0 is no limit" };

const state = { prompt: [], tokens: [], start: 0, choice: { layer: null, head: null }, pinned: null, pointed: null, messages: [], answer: null, request: null, frame: null };
const controls = new Map(), sliders = new Map();
let { ramp } = colours();

// --- requests

class Refusal extends Error {}

async function post(path, body, signal) {
	const headers = { "content-type": "application/json" }, key = find("key")?.value;
	if (key) headers.authorization = `Bearer ${key}`;
	let response;
	try {
		response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal, credentials: "same-origin" });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new Refusal("the server does not answer; is it still running?");
	}
	if (response.ok) return response;
	const answer = await response.json().catch(() => null);
	if (response.status === 401 || response.status === 403) find("key-row").hidden = false;
	throw new Refusal(answer?.error?.message ?? `the server answered ${response.status}.`);
}

// The data of server-sent events, parsed, until [DONE].
async function* events(response) {
	const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
	for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
		const whole = (text + part.value).split(/\r?\n\r?\n/);
		text = whole.pop();
		for (const event of whole) {
			const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
			if (data === "[DONE]") return;
			if (data) yield JSON.parse(data);
		}
	}
	throw new Refusal("the connection ended before the text did.");
}

// What to trace: every head while that stays small, else the means.
function traced() {
	const L = facts.layers ?? 1, H = facts.heads ?? 1, top = clamp(Math.floor(WEIGHTS / L), 1, TOP);
	const heads = L * H <= EVERY_HEAD && L * (1 + H) * top <= WEIGHTS ? "all" : "mean";
	return { entropy: true, attention: { layers: "all", heads, top }, sensitivity: true, confidence: true };
}

function sampling() {
	const values = Object.fromEntries([...controls].map(([name, read]) => [name, read()]));
	if (!values.top_k) delete values.top_k;
	return values;
}

function steered() {
	if (!DIRECTIONS.length) return {};
	const budget = sliders.get("token_kl")();
	return { steer: Object.fromEntries(DIRECTIONS.map(({ name, unit }) => [name, unit * sliders.get(name)()])), ...(budget ? { token_kl: budget } : {}) };
}

const stops = () => (mode() === "chat" ? facts.stops ?? [] : []);

// Continues `ids`; the tokens of `known` stay as they are where the ids agree.
async function generate(ids, known, room) {
	const values = sampling(), chosen = stops();
	const request = { abort: new AbortController(), began: performance.now(), values, finish: null };
	stop();
	Object.assign(state, { request, prompt: ids, tokens: [], start: ids.length, pinned: null, pointed: null });
	find("error").hidden = true;
	find("tokens").replaceChildren();
	busy(true);
	const body = {
		...values, model: facts.model, prompt: ids, max_tokens: room ?? values.max_tokens, echo: true, stream: true, logprobs: ALTERNATIVES, return_token_ids: true, fenchel: { ...traced(), ...steered() },
		stop: chosen.filter((one) => typeof one === "string"), stop_token_ids: chosen.filter((one) => typeof one === "number"),
	};
	for (const name of ["stop", "stop_token_ids"]) if (!body[name].length) delete body[name];
	try {
		const response = await post("/v1/completions", body, request.abort.signal), decoder = pieces();
		for await (const event of events(response)) {
			if (state.request !== request) return;
			if (event.error) throw new Refusal(event.error.message);
			const one = event.choices?.[0];
			if (!one) continue;
			take(one, ids, known, decoder);
			request.finish = one.finish_reason ?? request.finish;
			if (request.finish) break;
		}
	} catch (error) {
		if (error.name !== "AbortError") tell(error instanceof Refusal ? error.message : `the answer of the server could not be read: ${error.message}`);
		else request.finish = "stopped";
	} finally {
		if (state.request === request) finished(request);
	}
}

// The tokens of one event of the stream.
function take(one, ids, known, decode) {
	const content = one.logprobs?.content ?? [], traces = [one.fenchel ?? []].flat();
	const first = content.length - traces.length; // entries before it are of the prompt
	content.forEach((entry, i) => {
		const at = state.tokens.length, old = known[at]?.id === entry.id && at < ids.length ? known[at] : null;
		add({
			id: entry.id,
			text: decode(entry),
			logprob: entry.logprob ?? null,
			top: (entry.top_logprobs ?? []).map((other) => ({ id: other.id, text: other.token, logprob: other.logprob })),
			trace: traces[i - first] ?? old?.trace ?? null,
			made: at >= ids.length || Boolean(old?.made),
		});
	});
	progress();
	state.frame ??= requestAnimationFrame(() => {
		state.frame = null;
		drawStrip();
	});
}

// Tokens may end inside a character: their bytes together give the text.
function pieces() {
	const decoder = new TextDecoder();
	return ({ token, bytes }) => (bytes?.length ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token ?? "");
}

// --- the form

const mode = () => new FormData(find("form")).get("mode") ?? "completion";

async function submit() {
	const text = find("prompt").value, chat = mode() === "chat";
	if (chat && !text.trim()) return;
	stop();
	find("error").hidden = true;
	const messages = chat ? [...history(), { role: "user", content: text }] : null;
	busy(true);
	try {
		const response = await post("/tokenize", chat ? { messages, add_generation_prompt: true } : { prompt: text }), { tokens } = await response.json();
		if (chat) {
			Object.assign(state, { messages, answer: tokens.length });
			find("prompt").value = "";
			find("restart").hidden = false;
		} else state.answer = null;
		await generate(tokens, state.tokens);
	} catch (error) {
		busy(false);
		tell(error instanceof Refusal ? error.message : `the answer of the server could not be read: ${error.message}`);
	}
}

// The conversation with the answer that is on the page.
function history() {
	if (state.answer === null || state.answer >= state.tokens.length) return [];
	const ends = [...stops(), ...(facts.ends ?? [])];
	let text = state.tokens.slice(state.answer).filter((token) => !ends.includes(token.id)).map((token) => token.text).join("");
	for (const one of stops()) if (typeof one === "string") text = text.split(one)[0];
	return [...state.messages, { role: "assistant", content: text.trim() }];
}

// Continues with another token at the place of the one at `at`.
function replace(at, other) {
	const before = state.tokens.slice(0, at), old = state.tokens[at], p = Math.exp(other.logprob);
	const trace = old.trace && { ...old.trace, p, rank: 1 + old.top.filter((one) => one.logprob > other.logprob).length, confidence: undefined };
	const known = [...before, { ...old, id: other.id, trace }];
	if (state.answer !== null && at < state.answer) state.answer = null; // no longer the conversation
	generate(known.map((token) => token.id), known);
}

function stop() {
	state.request?.abort.abort();
	state.request = null;
}

function busy(on) {
	find("stop").disabled = !on;
	find("tokens").setAttribute("aria-busy", on);
	find("status").textContent = on ? "Reading the prompt" : "";
	find("save").disabled = on || !state.tokens.length;
	find("legend").hidden = false;
}

function progress() {
	const made = state.tokens.length - state.start;
	find("hint").hidden = true;
	if (made === 1) find("status").textContent = "Generating"; // once: a screen reader speaks every change
}

function finished(request) {
	const made = Math.max(state.tokens.length - state.start, 0), seconds = (performance.now() - request.began) / 1000;
	const why = { stop: "ended by the model", length: "ended by the limit", stopped: "stopped" }[request.finish] ?? "";
	state.request = null;
	busy(false);
	find("status").textContent = [`${made} token${made === 1 ? "" : "s"} in ${seconds.toFixed(1)} s`, why].filter(Boolean).join(", ");
	if (!state.tokens.length) find("status").textContent = "";
	light();
}

function tell(sentence) {
	const shown = find("error");
	shown.textContent = sentence.charAt(0).toUpperCase() + sentence.slice(1);
	shown.hidden = false;
}

function control({ name, label, low, high, step, value: usual, about, number }, kept = controls) {
	const value = clamp(facts.sampling?.[name] ?? usual, low, high); // the checkpoint's own where it has one
	const input = node("input", { type: number ? "number" : "range", min: low, max: high, step, value, id: `sampling-${name}`, "aria-describedby": `about-${name}` });
	const shown = node("output", {}, number ? "" : input.value);
	input.addEventListener("input", () => (shown.textContent = number ? "" : input.value));
	kept.set(name, () => clamp(Number(input.value) || 0, low, high));
	return box("control", node("label", { for: input.id }, label, " ", shown), input, node("small", { id: `about-${name}` }, about));
}

// --- the text

function add(token) {
	const at = state.tokens.length;
	const element = node("span", { role: "button", class: token.made ? "piece made" : "piece", tabindex: at ? -1 : 0 });
	const space = /^ [^\s]/.test(token.text) ? " " : ""; // outside of the element, so that lines break before it
	const shown = token.text.slice(space.length).replace(/\n+$/, ""), ends = token.text.length - space.length - shown.length;
	element.append(shown || (token.text ? "" : "◌"));
	if (ends) element.append(node("i", { class: "end-of-line" }, "↵".repeat(ends)));
	element.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && point(at));
	element.addEventListener("focus", () => point(at));
	element.addEventListener("click", () => pin(state.pinned === at ? null : at));
	element.addEventListener("keydown", (event) => {
		if (event.key === "Enter" || event.key === " ") {
			event.preventDefault();
			pin(state.pinned === at ? null : at);
			if (state.pinned === at) find("inspector").querySelector(".alternatives button:enabled")?.focus();
		} else if (event.key === "Escape") pin(null);
	});
	onArrows(element, (right, down) => focusOn(down ? neighbour(at, down) : at + right));
	state.tokens.push({ ...token, element });
	find("tokens").append(space, element, ...range(ends).map(() => node("br")));
	element.setAttribute("aria-label", summary(at));
	shadeToken(at, active() === null ? null : new Map());
}

function focusOn(at) {
	const place = clamp(at, 0, state.tokens.length - 1);
	for (const { element } of state.tokens) element.tabIndex = -1;
	const { element } = state.tokens[place];
	element.tabIndex = 0;
	element.focus();
}

// The token nearest to that at `at` in the line above or below.
function neighbour(at, down) {
	const here = state.tokens[at].element.getBoundingClientRect();
	const distance = ({ element }) => {
		const { top, left } = element.getBoundingClientRect(), rows = (top - here.top) * down;
		return rows > 4 ? rows * 1000 + Math.abs(left - here.left) : Infinity;
	};
	const away = state.tokens.map(distance), least = Math.min(...away);
	return least === Infinity ? at : away.indexOf(least);
}

const active = () => state.pointed ?? state.pinned;
// While no token is active and none is being written, the numbers are those of the last one; on a narrow screen they
// would cover the text.
const wide = matchMedia("(width > 60rem)");
const latest = () => (state.request || !wide.matches || !state.tokens.length ? null : state.tokens.length - 1);

function point(at) {
	if (state.pointed === at) return;
	state.pointed = at;
	light();
}

function pin(at) {
	state.pinned = at;
	state.pointed = null;
	light();
	if (at !== null) uncover(state.tokens[at].element);
}

// On a narrow screen the numbers lie over the lower half of the text.
function uncover(element) {
	const { bottom, right } = element.getBoundingClientRect(), { top, left } = find("inspector").getBoundingClientRect();
	if (bottom > top && right > left) element.scrollIntoView({ block: "nearest" });
}

// What a token read, by the chosen layer and head: {top: [[position, weight]], rest, sink}, or null.
function readOf(token) {
	const attention = token?.trace?.attention, { layer, head } = state.choice;
	if (!attention) return null;
	if (layer === null) return attention.last_third ?? null;
	const one = attention.layers.find((each) => each.layer === layer);
	return (head === null ? one : one?.heads?.[head]) ?? null;
}

// The weights to show while the token at `at` is active: what it read, or for a token of the prompt who read it.
function weightsOf(at) {
	const read = readOf(state.tokens[at]), given = (token) => readOf(token)?.top.find(([position]) => position === at)?.[1] ?? 0;
	const weights = new Map(read ? read.top : state.tokens.map((token, i) => [i, given(token)]).filter(([, weight]) => weight > 0));
	weights.most = Math.max(...weights.values(), 1e-9);
	return weights;
}

function shadeToken(at, weights = null) {
	const { element, logprob } = state.tokens[at], { style } = element;
	const share = weights ? Math.sqrt((weights.get(at) ?? 0) / weights.most) : null;
	element.classList.toggle("read", share > 0);
	element.classList.toggle("active", at === active());
	element.classList.toggle("latest", active() === null && at === latest());
	element.classList.toggle("kept", at === state.pinned);
	element.setAttribute("aria-pressed", at === state.pinned);
	if (weights === null && logprob !== null) {
		const [r, g, b] = shade(ramp, Math.min(-logprob / NATS, 1));
		style.backgroundColor = css([r, g, b]);
		style.color = inkOn([r, g, b]);
	} else style.color = style.backgroundColor = "";
	style.setProperty("--weight", share === null ? "" : share.toFixed(4));
}

function light() {
	const at = active(), weights = at === null ? null : weightsOf(at);
	state.tokens.forEach((_, i) => shadeToken(i, weights));
	find("tokens").classList.toggle("reading", at !== null);
	find("largest").textContent = weights?.size ? `weight ${digits(+weights.most.toPrecision(3))}, square-root scale` : "";
	inspect(at ?? latest());
	drawStrip();
}

const spoken = (text) => (text.trim() ? text.trim() : text ? { " ": "space", "\n": "end of line", "\t": "tab" }[text[0]] ?? "blank" : "part of a character");

// A sentence for screen readers.
function summary(at) {
	const token = state.tokens[at], read = readOf(token), parts = [`${spoken(token.text)}, ${token.made ? "new" : "prompt"} token ${at + 1}`];
	if (token.logprob !== null) parts.push(`probability ${digits(Math.exp(token.logprob))}${token.trace ? `, rank ${token.trace.rank}` : ""}`);
	if (read?.top.length) parts.push("read " + read.top.slice(0, 3).map(([i, weight]) => `${spoken(state.tokens[i].text)} ${weight.toFixed(2)}`).join(", "));
	return parts.join("; ");
}

// --- the chosen token

function inspect(at) {
	const host = find("inspector"), shown = JSON.stringify([at, state.pinned, state.choice, state.tokens[at]?.id]);
	if (host.dataset.shown === shown) return; // a control in it keeps the focus
	host.dataset.shown = shown;
	const focused = host.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
	if (at === null) {
		host.replaceChildren(node("p", { class: "note" }, "Point at a token, or tap it, to see what it read, how sure the model was and what else it could have written. A click keeps it here" + (facts.lens ? ", with what each layer would have written." : ".")));
		return;
	}
	const token = state.tokens[at], { trace } = token, parts = [];
	const close = node("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
	close.addEventListener("click", () => {
		pin(null);
		token.element.focus({ preventScroll: true });
	});
	parts.push(box("title", node("h2", {}, quoted(token.text)), node("p", {}, `${token.made ? "new" : "prompt"} token ${at + 1} of ${state.tokens.length}`), ...(state.pinned === at ? [close] : [])));
	parts.push(numbers(token));
	if (trace?.attention) parts.push(reading(token), layers(trace));
	else parts.push(readers(at));
	if (token.lens || (facts.lens && at && state.pinned === at && !recording)) parts.push(lens(at));
	if (token.top.length && !recording) parts.push(alternatives(at));
	host.replaceChildren(...parts);
	if (focused) [...host.querySelectorAll("select, button")].find((control) => control.getAttribute("aria-label") === focused)?.focus();
}

function numbers({ logprob, trace }) {
	const list = node("dl"), fact = (name, value, about) => list.append(box("", node("dt", {}, name), node("dd", {}, value, ...(about ? [node("small", {}, about)] : []))));
	if (logprob !== null) fact("probability", digits(+Math.exp(logprob).toPrecision(3)), `surprise ${(-logprob).toFixed(2)} nats`);
	if (trace) {
		fact("rank", trace.rank.toLocaleString("en"), "1 is the likeliest");
		fact("entropy", `${trace.entropy.toFixed(2)} nats`, `as ${digits(+trace.effective.toPrecision(3))} even tokens`);
	}
	if (trace?.confidence) fact("confidence", digits(+trace.confidence.p.toPrecision(3)), `calibration error ${digits(+trace.confidence.error.toPrecision(2))} on ${trace.confidence.predictions.toLocaleString("en")} predictions`);
	return list;
}

function select(label, options, chosen, change) {
	const input = node("select", { "aria-label": label }, ...options.map(([value, text]) => node("option", { value }, text)));
	input.value = chosen ?? "";
	input.disabled = options.length < 2;
	input.addEventListener("change", () => change(input.value === "" ? null : Number(input.value)));
	return input;
}

function choose(changes) {
	Object.assign(state.choice, changes);
	state.pinned ??= latest(); // the weights of the choice light up
	state.tokens.forEach(({ element }, i) => element.setAttribute("aria-label", summary(i)));
	light();
}

function chooser({ attention }) {
	const { layer, head } = state.choice, count = layer === null ? 0 : attention.layers.find((one) => one.layer === layer)?.heads?.length ?? 0;
	return box("chooser",
		select("Layer", [["", "mean of the last third"], ...attention.layers.map((one) => [one.layer, `layer ${one.layer + 1}`])], layer, (value) => choose({ layer: value, head: null })),
		select("Head", [["", "mean of heads"], ...range(count).map((i) => [i, `head ${i + 1}`])], head, (value) => choose({ head: value })));
}

const meter = (share, ...children) => {
	const bar = node("span", { class: "meter" }, node("i"), ...children);
	bar.firstChild.style.width = `${(100 * clamp(share, 0, 1)).toFixed(1)}%`;
	return bar;
};
const weightRow = (name, weight, most) => node("li", {}, name, most ? meter(weight / most) : node("span"), node("span", { class: "value" }, weight.toFixed(3)));

function reading({ trace }) {
	const read = readOf({ trace }), list = node("ul", { class: "weights" });
	if (read) {
		for (const [at, weight] of read.top) if (weight >= LEAST) list.append(weightRow(quoted(state.tokens[at]?.text ?? ""), weight, read.top[0][1]));
		const small = read.top.reduce((sum, [, weight]) => sum + (weight < LEAST ? weight : 0), read.rest);
		if (read.sink >= LEAST) list.append(weightRow(node("em", {}, "learned sink"), read.sink));
		if (small >= LEAST) list.append(weightRow(node("em", {}, "all others"), small));
	}
	return node("section", {}, node("h3", {}, "What it read"), chooser(trace), list);
}

function readers(at) {
	const weights = [...weightsOf(at)].sort((a, b) => b[1] - a[1]).slice(0, TOP), some = state.tokens.find((token) => token.trace?.attention);
	if (!some) return node("p", { class: "note" }, "Attention is traced for new tokens.");
	const list = node("ul", { class: "weights" }, ...weights.map(([i, weight]) => weightRow(quoted(state.tokens[i].text), weight, weights[0][1])));
	return node("section", {}, node("h3", {}, "What read it"), chooser(some.trace), weights.length ? list : node("p", { class: "note" }, "No token has it among the largest weights."));
}

function layers({ attention, sensitivity }) {
	const shown = attention.layers.filter((one) => one.entropy !== undefined), moved = new Map((sensitivity?.layers ?? []).map((one) => [one.layer, one]));
	if (!shown.length) return node("section");
	const widest = Math.max(...shown.map((one) => one.entropy), Math.log(attention.position + 1)), most = sensitivityScale();
	const rows = shown.map((one) => {
		const row = node("tr", { class: one.layer === state.choice.layer ? "chosen" : "" }, node("th", { scope: "row" }, String(one.layer + 1)));
		const keys = one.support === undefined ? digits(+one.keys.toPrecision(3)) : `${digits(+one.keys.toPrecision(3))} of ${digits(+one.support.toPrecision(3))}`;
		row.append(node("td", {}, meter(one.entropy / widest)), node("td", { class: "value" }, keys));
		const bound = moved.get(one.layer);
		if (bound) row.append(node("td", {}, bracket(bound, most)), node("td", { class: "value" }, sensitivityText(bound)));
		return row;
	});
	const head = [["layer"], ["entropy and keys", 2], ...(moved.size ? [["sensitivity", 2]] : [])].map(([text, span]) => node("th", { scope: "col", colspan: span ?? 1 }, text));
	const certified = [...moved.values()].every((one) => one.certified);
	const about = moved.size ? node("p", { class: "about" }, `Sensitivity: how far the weights of the most sensitive head move per unit of score, ${certified ? "an upper bound that holds after rounding" : "≈ where the bound is not proven"}.`) : "";
	return node("section", {}, node("h3", {}, "Layers"), node("table", { class: "layers" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...rows)), about);
}

const sensitivityText = ({ upper, lower, certified }) => (upper === null ? `≥ ${(Math.floor(1000 * lower) / 1000).toFixed(3)}` : `${certified ? "≤" : "≈"} ${(Math.ceil(1000 * upper) / 1000).toFixed(3)}`);
// One half is the largest sensitivity that softmax can have.
const sensitivityScale = () => Math.max(0.5, ...state.tokens.flatMap((token) => (token.trace?.sensitivity?.layers ?? []).map((one) => one.upper ?? one.lower)));

// From 0 to the lower bound in full, to the upper bound in pale.
function bracket({ lower, upper, certified }, most) {
	const bar = meter(lower / most, node("b", { class: certified ? "" : "open" })), share = clamp((upper ?? most) / most, 0, 1);
	bar.lastChild.style.width = `${(100 * share).toFixed(1)}%`;
	return bar;
}

// What every layer would have written in the place of the token, and how likely it found the token.
function lens(at) {
	const token = state.tokens[at], host = node("section", { class: "by-layer" }, node("h3", {}, "What each layer would write"));
	if (token.lens) {
		host.append(...lensTable(token.lens));
		return host;
	}
	const note = node("p", { class: "note" }, "Reading the layers."), ids = state.tokens.slice(0, at).map((one) => one.id);
	host.append(note);
	token.lensAnswer ??= post("/lens", { model: facts.model, tokens: ids, next: token.id, top: 1 }).then((response) => response.json());
	token.lensAnswer.then(({ layers }) => { // in its place: a control beside it may be open
		token.lens = layers;
		note.replaceWith(...lensTable(layers));
	}).catch((error) => {
		token.lensAnswer = undefined;
		note.textContent = error instanceof Refusal ? error.message : "the layers could not be read.";
	});
	return host;
}

function lensTable(layers) {
	const rows = layers.map(({ layer, top: [best], p }) => node("tr", {}, node("th", { scope: "row" }, String(layer)), node("td", {}, quoted(best.token)), node("td", { class: "value" }, best.p.toFixed(2)), node("td", {}, meter(p)), node("td", { class: "value" }, p.toFixed(2))));
	const head = [["layer"], ["writes", 2], ["this token", 2]].map(([text, span]) => node("th", { scope: "col", colspan: span ?? 1 }, text));
	const steers = DIRECTIONS.length ? " The lens reads the model without directions." : "";
	return [node("table", { class: "layers" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...rows)), node("p", { class: "about" }, `The stream after a layer, read as if it were the last.${steers}`)];
}

function alternatives(at) {
	const token = state.tokens[at], list = node("ul", { class: "weights alternatives" });
	for (const other of token.top) {
		const p = Math.exp(other.logprob), same = other.id === token.id;
		const button = node("button", { type: "button", ...(same ? { "aria-current": "true", disabled: "" } : {}), "aria-label": `${spoken(other.text)}, probability ${digits(+p.toPrecision(3))}${same ? ", the token of the text" : ""}` }, quoted(other.text));
		button.addEventListener("click", () => replace(at, other));
		list.append(node("li", {}, button, meter(p), node("span", { class: "value" }, p.toFixed(3))));
	}
	return node("section", {}, node("h3", {}, "Alternatives"), node("p", { class: "about" }, "Choose one and the text continues from here, with the same seed."), list);
}

// --- the strip of entropies

function drawStrip() {
	const host = find("strip"), made = state.tokens.map((token, i) => [i, token.trace?.attention?.layers]).filter(([, all]) => all?.[0]?.entropy !== undefined);
	host.hidden = !made.length;
	if (!made.length) return;
	const canvas = host.querySelector("canvas"), readout = host.querySelector("output"), paint = colours(), left = 26;
	const count = made[0][1].length, row = clamp(Math.round(150 / count), 4, 16), width = widthOf(host), cell = Math.min((width - left) / made.length, 18);
	const most = made.reduce((best, [, all]) => all.reduce((high, one) => Math.max(high, one.entropy), best), 1e-9), pen = context(canvas, width, count * row);
	made.forEach(([, all], j) => all.forEach((one, i) => {
		pen.fillStyle = css(shade(paint.ramp, one.entropy / most));
		pen.fillRect(left + j * cell, i * row, cell - (cell > 6 ? 1 : 0), row - (row > 8 ? 1 : 0));
	}));
	pen.fillStyle = paint.muted;
	for (let i = 0; i < count; i += Math.ceil(12 / row)) pen.fillText(made[0][1][i].layer + 1, 0, (i + 0.5) * row);
	const at = made.findIndex(([i]) => i === active());
	pen.strokeStyle = paint.alert;
	pen.lineWidth = 1.5;
	if (at >= 0) pen.strokeRect(left + at * cell - 0.5, 0.75, cell, count * row - 1.5);
	host.querySelector(".most").textContent = `${most.toFixed(1)} nats`;
	readout.replaceChildren(...(at < 0 ? ["layers down, new tokens across"] : [quoted(state.tokens[active()].text), " ", made[at][1].map((one) => one.entropy.toFixed(1)).join(" ")]));
	canvas.place = (x) => made[clamp(Math.floor((x * width - left) / cell), 0, made.length - 1)][0];
}

// --- saving

// The page as one file that loads and sends nothing: its policy admits its own script and style.
function saved() {
	const escape = (text) => text.replace(/&/g, "&amp;").replace(/"/g, "&quot;").replace(/</g, "&lt;");
	const tokens = state.tokens.map(({ element, lensAnswer, ...token }) => token);
	const data = JSON.stringify({ facts, recording: { tokens, start: state.start, choice: state.choice } }).replace(/</g, "\\u003c");
	const parts = [...pristine.children].filter((element) => element.id !== "data" && element.id !== "code").map((element) => element.outerHTML);
	const meta = [...document.head.querySelectorAll("meta")].filter((element) => !element.httpEquiv).map((element) => element.outerHTML);
	return [
		"<!doctype html>\n<html lang=\"en\">\n<head>", meta[0], `<meta http-equiv="Content-Security-Policy" content="${escape(policy)}">`, ...meta.slice(1),
		`<title>${escape(document.title)}</title>`, `<style>${document.querySelector("style").textContent}</style>\n</head>\n<body>`, ...parts,
		`<script type="application/json" id="data">${data}<\/script>`, `<script type="module" id="code">${find("code").textContent}<\/script>\n</body>\n</html>\n`,
	].join("\n");
}

function save() {
	const address = URL.createObjectURL(new Blob([saved()], { type: "text/html" }));
	node("a", { href: address, download: `${facts.model.replace(/[^\w.-]+/g, "-").slice(0, 60)}.html` }).click();
	setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// --- beginning

function about() {
	const many = (count, word) => (count === undefined ? null : `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`);
	return [many(facts.layers, "layer"), many(facts.heads, "head"), facts.context && `context ${facts.context.toLocaleString("en")}`, facts.fingerprint && `fingerprint ${facts.fingerprint}`].filter(Boolean).join(" · ");
}

function modeChanged() {
	const chat = mode() === "chat";
	find("prompt-label").textContent = chat ? "Message" : "Prompt";
	find("generate").textContent = chat ? "Send" : "Generate";
	find("restart").hidden = !chat || !state.messages.length;
}

function listen() {
	const form = find("form");
	document.querySelector("#sampling .controls").append(...CONTROLS.map((one) => control(one)));
	const steering = find("steering");
	steering.hidden = !DIRECTIONS.length;
	steering.querySelector(".controls").append(...(DIRECTIONS.length ? [...DIRECTIONS, BUDGET] : []).map((one) => control(one, sliders)));
	steering.addEventListener("change", () => state.prompt.length && generate(state.prompt, []));
	form.addEventListener("submit", (event) => {
		event.preventDefault();
		submit();
	});
	form.addEventListener("change", modeChanged);
	find("prompt").addEventListener("keydown", (event) => {
		if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (mode() === "chat" && !event.shiftKey))) {
			event.preventDefault();
			submit();
		}
	});
	find("stop").addEventListener("click", () => state.request?.abort.abort());
	find("save").addEventListener("click", save);
	find("restart").addEventListener("click", () => {
		stop();
		Object.assign(state, { messages: [], answer: null, prompt: [], tokens: [], start: 0, pinned: null, pointed: null });
		find("tokens").replaceChildren();
		busy(false);
		light();
		modeChanged();
		find("prompt").focus();
	});
	document.querySelector(".modes").hidden = !facts.chat;
	form.querySelector(`input[value=${facts.chat ? "chat" : "completion"}]`).checked = true; // whatever a browser has restored
	find("key-row").hidden = !facts.key;
	form.hidden = find("inspector").hidden = facts.generates === false;
	find("hint").textContent = form.hidden ? "This model gives embeddings, by /v1/embeddings, and continues no text." : "Tokens appear here. Point at one, or tap it, and the earlier tokens that it read light up.";
	modeChanged();
}

function replay() {
	find("form").remove();
	find("foot").textContent = "Saved by fenchel. Attention is what a token read, and not why it was chosen. This page is one file: it loads nothing and sends nothing.";
	Object.assign(state, { start: recording.start, choice: recording.choice });
	recording.tokens.forEach(add);
	find("legend").hidden = false;
	find("hint").remove();
	light();
}

find("about").textContent = about();
inspect(null);
find("tokens").addEventListener("pointerleave", () => point(null));
find("tokens").addEventListener("focusout", () => point(null));
const strip = find("strip").querySelector("canvas");
onMove(strip, (x) => strip.place && point(strip.place(x)));
strip.addEventListener("pointerleave", () => point(null));
strip.addEventListener("click", () => state.pointed !== null && pin(state.pointed));
addEventListener("resize", drawStrip);
wide.addEventListener("change", light);
addEventListener("keydown", (event) => event.key === "Escape" && state.pinned !== null && pin(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
	({ ramp } = colours());
	light();
});
if (recording) replay();
else listen();
