// Every way to divide the evenings as a dot: variety to the right, points upwards. The line of equal
// totals has the slope -T, meets the axis at T log sum exp(z / T), and touches the region at softmax.
const [COLD, HOT] = [0.05, 2.5], NAMES = ["A", "B", "C"];
const scoresOf = (s) => NAMES.map((name) => s[name]);
const place = (p, z) => [entropy(p), dot(p, z)];
const variety = DATA.rivals.map(entropy);
const edge = (z, sign) => range(161).map((i) => place(choose("softmax", z, (sign * 50) / 1e4 ** (i / 160)), z));

// The least variety with an average score of m: only two of the three are used.
function least(z, m) {
	const sides = [[0, 1], [0, 2], [1, 2]].map(([i, j]) => {
		const t = z[i] === z[j] ? (m === z[i] ? 0 : NaN) : (m - z[j]) / (z[i] - z[j]);
		return t >= 0 && t <= 1 ? entropy([t, 1 - t]) : Infinity;
	});
	return Math.min(...sides);
}
function inner(z) {
	const heights = [...between(Math.max(...z), Math.min(...z), 241), ...z].sort((a, b) => b - a);
	return heights.map((m) => [least(z, m), m]).filter(([h]) => Number.isFinite(h));
}
function best(s) {
	const z = scoresOf(s), totals = DATA.rivals.map((q, i) => dot(q, z) + s.T * variety[i]);
	const index = totals.reduce((top, total, i) => (total > totals[top] ? i : top), 0);
	return { at: [variety[index], dot(DATA.rivals[index], z)], total: totals[index] };
}

const page = stage(), button = page.button();
const corner = (name) => ({
	label: `Score of restaurant ${name}`,
	letter: name,
	tone: "s0",
	step: [0, 0.1],
	at: (s) => [0, s[name]],
	move: (s, [, y]) => ({ [name]: Math.round(clamp(y, 0, 3) * 20) / 20 }),
	say: (s) => `score ${fixed(s[name])}`,
});
const picture = scene(page.picture, {
	label: "Points against variety: all divisions, softmax on their edge, and the touching line",
	x: [0, 1.2],
	y: [-0.3, 4],
	ratio: 0.78,
	ratioNarrow: 1.1,
	axes: {
		gap: 20,
		x: "variety (entropy, nats) →",
		y: "points (average score) ↑",
		xTicks: [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2],
		yTicks: [0, 1, 2, 3, 4],
	},
	state: DATA.state,
	handles: {
		A: corner("A"),
		B: corner("B"),
		C: corner("C"),
		T: {
			label: "Temperature: where the line touches",
			tone: "s1",
			at: (s) => place(choose("softmax", scoresOf(s), 1 / s.T), scoresOf(s)),
			move(s, [x, y]) { // the nearest place on the edge, as it looks on the screen
				const z = scoresOf(s), away = ([h, m]) => (4 * (h - x)) ** 2 + (m - y) ** 2;
				const all = range(301).map((i) => COLD * (HOT / COLD) ** (i / 300));
				const far = all.map((T) => away(place(choose("softmax", z, 1 / T), z)));
				return { T: all[far.indexOf(Math.min(...far))] };
			},
			keys: (s, way, far) => ({ T: clamp(s.T * 1.05 ** (way * far), COLD, HOT) }),
			say: (s) => `temperature ${fixed(s.T)}`,
		},
	},
	draw(pen, s) {
		const z = scoresOf(s), at = place(choose("softmax", z, 1 / s.T), z), total = at[1] + s.T * at[0];
		const right = edge(z, 1), left = edge(z, -1), line = (x) => [x, total - x * s.T];
		pen.region([...inner(z), ...left, ...right.slice().reverse()], { tone: "muted", opacity: 0.13 });
		pen.points(DATA.rivals.map((q, i) => [variety[i], dot(q, z)]), { radius: 1.5, opacity: 0.55 });
		pen.curve(left, { tone: "s0", width: 1.2, dash: "4 4", opacity: 0.7 });
		pen.curve(right, { tone: "s0", width: 3 });
		pen.line(line(0), line(1.2), { tone: "s1", width: 2.2 });
		pen.dot(best(s).at, { radius: 5, hollow: true });
		if (total < 3.95) {
			pen.dot([0, total], { tone: "s1", radius: 4.5 });
			pen.text([0, total], `total ${fixed(total)}`, { tone: "s1", dx: 10, dy: at[0] < 0.3 ? -36 : -14, bold: true });
		} else pen.text([0, 4], `total ${fixed(total)} ↑`, { tone: "s1", dx: 16, dy: 6, bold: true });
		// Away from the word softmax: at the right end, or in the middle of a steep line.
		const end = at[0] < 0.72 && line(1.2)[1] > 0.2, x = end ? 1.2 : Math.max(0.36, (total - 3.7) / s.T);
		const beside = end ? { anchor: "end", dy: -12 - 40 * s.T } : { dx: 8, dy: -14 };
		pen.text(line(x), `slope −T = −${fixed(s.T)}`, { tone: "s1", ...beside });
		pen.text(at, "softmax", { tone: "s0", dx: 12, dy: s.T > 1.9 ? 18 : -17, bold: true });
	},
});
slider(page.controls, picture, { name: "T", label: "Temperature T", low: COLD, high: HOT, log: true });
picture.play(button, { name: "T", from: HOT, to: COLD, seconds: 6, log: true, words: ["Cool down", "Pause"] });
const total = page.number("points and T × variety together: where the line meets the axis", "s1");
const gap = page.number("short of it stays the best of 1,000 random divisions, the small ring");
page.side.append(node("h2", {}, "Share of the evenings"));
const shares = bars(page.side, NAMES.map((name) => ({ name })));
picture.watch((s) => {
	const z = scoresOf(s), p = choose("softmax", z, 1 / s.T), value = dot(p, z) + s.T * entropy(p);
	shares(p);
	total(fixed(value, 3));
	gap(fixed(value - best(s).total, 4));
});
share(picture);
