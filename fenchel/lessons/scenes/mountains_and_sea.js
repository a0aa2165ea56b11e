// Scores as mountains in the sea. The weight of a mountain is its height above the water, scaled by
// (alpha - 1) beta and raised to 1 / (alpha - 1); the sea settles where the weights sum to 1. While
// it is held at another level, what is above it sums to something else.
const NAMES = ["A", "B", "C", "D", "E", "F"], ALPHA = { softmax: 1, entmax: 1.5, sparsemax: 2 }, [LOW, HIGH] = [-3, 3];
const scoresOf = (s) => NAMES.map((name) => s[name]);
const above = (s, z, level) => Math.max(0, (ALPHA[s.map] - 1) * s.beta * (z - level)) ** (1 / (ALPHA[s.map] - 1));
function settled(s) { // the level that explains the weight of the best
	const z = scoresOf(s), top = Math.max(...z), p = Math.max(...choose(s.map, z, s.beta)), a = ALPHA[s.map] - 1;
	return a ? top - p ** a / (a * s.beta) : -Infinity;
}
const levelOf = (s) => (s.map === "softmax" || s.sea === "settled" ? settled(s) : s.sea);
const weightsOf = (s) => (s.map === "softmax" || s.sea === "settled" ? choose(s.map, scoresOf(s), s.beta) : scoresOf(s).map((z) => above(s, z, s.sea)));
const total = (s) => weightsOf(s).reduce((a, b) => a + b, 0);
const peak = (name, i) => ({
	label: `Score of ${name}`,
	letter: name,
	tone: "ink",
	step: [0, 0.1],
	at: (s) => [i + 0.5, s[name]],
	move: (s, [, y]) => ({ [name]: Math.round(clamp(y, -2.5, 2.5) * 20) / 20, sea: "settled" }),
	say: (s) => `score ${fixed(s[name])}, weight ${fixed(weightsOf(s)[i], 3)}`,
});
const held = store(DATA.state), page = stage();
const picture = scene(page.picture, {
	label: "Six mountains and the sea: what stands above the water has weight",
	store: held,
	x: [0, 6.7],
	y: [LOW, HIGH],
	ratio: 0.66,
	ratioNarrow: 0.95,
	margin: { bottom: 14 },
	axes: { y: "score ↑", yTicks: [-3, -2, -1, 0, 1, 2, 3] },
	handles: {
		...Object.fromEntries(NAMES.map((name, i) => [name, peak(name, i)])),
		sea: {
			label: "Sea level",
			tone: "s6",
			at: (s) => [6.4, clamp(levelOf(s), LOW, HIGH)],
			move: (s, [, y]) => (s.map === "softmax" ? {} : { sea: clamp(Math.round(50 * y) / 50, LOW + 0.2, 2.4) }),
			step: [0, 0.02],
			say: (s) => (s.map === "softmax" ? "softmax has no sea" : `sea level ${fixed(levelOf(s))}, weights sum to ${fixed(total(s))}`),
		},
	},
	draw(pen, s) {
		const tone = TONES[s.map], level = levelOf(s);
		const slope = (t) => (1 + Math.cos(Math.PI * clamp(t, -1, 1))) / 2; // of a mountain, from its peak
		NAMES.forEach((name, i) => {
			const side = between(-0.62, 0.62, 41).map((t) => [i + 0.5 + t, LOW + (s[name] - LOW) * slope(t / 0.62)]);
			pen.region([[i - 0.12, LOW], ...side, [i + 1.12, LOW]], { tone: "muted", opacity: 0.3 });
		});
		if (level > LOW) {
			const waves = between(0, 6.7, 135).map((x) => [x, level + 0.02 * Math.sin(9 * x)]);
			pen.region([[0, LOW], ...waves, [6.7, LOW]], { tone: "s6", opacity: 0.3 });
			pen.curve(waves, { tone: "s6", width: 2.2 });
		}
		NAMES.forEach((name, i) => {
			if (s[name] > level) pen.line([i + 0.5, Math.max(level, LOW)], [i + 0.5, s[name]], { tone, width: 6 });
		});
		if (level > LOW) pen.text([6.4, level], "sea", { tone: "s6", bold: true, anchor: "middle", dy: level > 1.5 ? 20 : -20 });
	},
});
radios(page.controls, held, {
	name: "map",
	label: "Map",
	options: [["softmax", "softmax", "s0"], ["entmax", "entmax 1.5", "s2"], ["sparsemax", "sparsemax", "s1"]],
});
slider(page.controls, held, { name: "beta", label: "Steepness β", low: 0.2, high: 4, log: true });
const button = page.button();
button.textContent = "Let the sea settle";
button.addEventListener("click", () => held.set({ sea: "settled" }));
const sum = page.number("is the sum of all weights: it must be 1");
const rows = page.side.appendChild(node("div"));
let shares = null, drawn = null;
held.watch((s) => {
	if (drawn !== s.map) { // bars in the colour of the map
		rows.replaceChildren();
		shares = bars(rows, NAMES.map((name) => ({ name, tone: TONES[s.map] })));
		drawn = s.map;
	}
	const p = weightsOf(s), all = total(s), zeros = p.filter((w) => w === 0).length;
	shares(p.map((w) => Math.min(1, w)));
	sum(fixed(all));
	button.disabled = s.sea === "settled" || s.map === "softmax";
	const state = Math.abs(all - 1) < 0.005 ? "" : all > 1 ? "Too much land: the sea must rise. " : "Too little land: the sea must fall. ";
	const under = zeros === 0 ? "no mountain is" : zeros === 1 ? "one mountain is" : `${zeros} mountains are`;
	page.says.textContent = s.map === "softmax" ? "Softmax has no sea: every mountain counts, however low." : `${state}${under[0].toUpperCase()}${under.slice(1)} under water, with weight exactly 0.`;
});
share(held, [...NAMES, "map", "beta"]);
