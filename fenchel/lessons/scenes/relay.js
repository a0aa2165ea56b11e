// The stages of a training run as a track of two rows, and the baton that is passed on. DATA.stages:
// [{ name, baton, hands, size, example }] in order.
const { stages } = DATA, COLUMNS = stages.length / 2, [HALF, LOW, HIGH] = [0.42, 0.36, 0.34]; // of a box, about the place of its stage
const spot = (i) => (i < COLUMNS ? [0.5 + i, 1.5] : [2 * COLUMNS - 0.5 - i, 0.5]); // the way back runs below
const along = (t) => { // a place between two stages
	const i = Math.min(Math.floor(t), stages.length - 2), [a, b] = [spot(i), spot(i + 1)], part = t - i;
	return [a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])];
};
const nearest = ([x, y]) => {
	const far = stages.map((_, i) => Math.hypot(x - spot(i)[0], y - spot(i)[1]));
	return far.indexOf(Math.min(...far));
};

// What each stage makes, in units of its box about its middle: [kind, points], by the place of the stage.
const square = (x, y, w, h) => ["close", [[x, y], [x + w, y], [x + w, y + h], [x, y + h]]];
const rule = (x0, x1, y) => ["line", [[x0, y], [x1, y]]];
const ICONS = [
	[rule(-1, 1, 0.6), rule(-1, 0.7, 0.2), rule(-1, 0.9, -0.2), rule(-1, 0.2, -0.6)],
	[[-1, 0.5], [-0.35, 0.8], [0.55, 0.4]].map(([x, w]) => square(x, 0.15, w, 0.5)).concat([[-1, 0.8], [-0.1, 0.45], [0.45, 0.5]].map(([x, w]) => square(x, -0.6, w, 0.5))),
	range(12).map((i) => square(-1 + 0.52 * (i % 4), -0.75 + 0.52 * Math.floor(i / 4), 0.44, 0.44)),
	[square(-0.9, -0.8, 1.8, 0.4), square(-0.9, -0.2, 1.8, 0.4), square(-0.9, 0.4, 1.8, 0.4), ["line", [[0, -0.4], [0, -0.2]]], ["line", [[0, 0.2], [0, 0.4]]]],
	[["line", between(-1, 1, 25).map((x) => [x, -0.7 + 1.5 * Math.exp(-2.2 * (x + 1))])], rule(-1, 1, -0.8)],
	[["line", between(-1, 1, 25).map((x) => [x, -0.7 + 1.4 * x * x])], ["line", [[0.95, 0.55], [0.5, -0.1]]], ["line", [[0.72, -0.02], [0.5, -0.1], [0.5, 0.16]]]],
	[["close", [[-0.9, -0.7], [0.9, -0.7], [0.9, 0.45], [0, 0.45], [-0.2, 0.7], [-0.9, 0.7]]], rule(-0.9, 0.9, 0.2)],
	[square(-0.7, -0.85, 1.4, 1.7), rule(-0.4, 0.4, 0.5), square(-0.4, -0.5, 0.2, 0.4), square(-0.1, -0.5, 0.2, 0.7), square(0.2, -0.5, 0.2, 0.25)],
];
const page = stage("wide"), button = page.button();
const picture = scene(page.picture, {
	label: "The stages of a training run and the baton between them",
	x: [0, COLUMNS],
	y: [0, 1.9],
	equal: true,
	open: true,
	margin: { left: 2, right: 2, top: 2, bottom: 2 },
	state: DATA.state,
	handles: {
		baton: {
			label: "The baton",
			tone: "s1",
			at: (s) => [along(s.stage)[0], along(s.stage)[1] - LOW],
			move: (s, at) => ({ stage: nearest([at[0], at[1] + LOW]) }),
			keys: (s, way, far) => ({ stage: clamp(Math.round(s.stage) + way * far, 0, stages.length - 1) }),
			say: (s) => `${stages[Math.round(s.stage)].name} hands on ${stages[Math.round(s.stage)].hands}`,
		},
	},
	draw(pen, s) {
		const now = Math.round(s.stage), size = pen.narrow ? 10.5 : 14;
		stages.forEach((each, i) => {
			const [x, y] = spot(i), box = [[x - HALF, y - LOW], [x + HALF, y - LOW], [x + HALF, y + HIGH], [x - HALF, y + HIGH]];
			if (i + 1 < stages.length) {
				const [nx, ny] = spot(i + 1), way = Math.sign(nx - x);
				const [a, b] = way ? [[x + way * HALF, y], [nx - way * HALF, y]] : [[x, y - LOW], [x, ny + HIGH]];
				pen.arrow(a, b, { tone: i < now ? "s1" : "muted", width: i < now ? 2.6 : 1.4 });
			}
			pen.region(box, { tone: i <= now ? "s0" : "muted", opacity: i === now ? 0.24 : i < now ? 0.12 : 0.08 });
			pen.curve(box, { tone: i === now ? "s0" : "muted", width: i === now ? 2.4 : 1, close: true });
			for (const [kind, points] of ICONS[i])
				pen.curve(points.map(([u, v]) => [x + 0.2 * u, y - 0.09 + 0.17 * v]), { tone: i <= now ? "s0" : "muted", width: 1.4, close: kind === "close" });
			pen.text([x, y + 0.21], each.name, { anchor: "middle", bold: i === now, halo: false, size });
		});
		const [x, y] = along(s.stage);
		pen.text([x, y - LOW], stages[now].baton, { tone: "s1", bold: true, size: pen.narrow ? 11 : 14, dx: 14, dy: 13 });
	},
});
picture.play(button, { name: "stage", from: 0, to: stages.length - 1, seconds: 12, words: ["Run the relay", "Pause"] });
picture.watch((s) => {
	const { name, hands, size, example } = stages[Math.round(s.stage)];
	const strong = node("b", {}, `${Math.round(s.stage) + 1}. ${name[0].toUpperCase()}${name.slice(1)}`);
	page.says.replaceChildren(strong, ` hands on ${hands}: ${size}.`, node("code", {}, example));
});
share(picture, []);
