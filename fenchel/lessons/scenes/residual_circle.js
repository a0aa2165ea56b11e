// A quarter of a turn by residual layers: h <- h + step F(h), F sideways with the speed of a quarter
// of a turn per unit of time. Steps of 1 / L spiral out a little, steps of 1 leave the frame.
const QUARTER = Math.PI / 2, MOST = 32;
const path = (layers, step) =>
	range(layers).reduce((all, i) => [...all, [all[i][0] - step * QUARTER * all[i][1], all[i][1] + step * QUARTER * all[i][0]]], [[1, 0]]);
const end = (s) => path(s.layers, 1 / s.layers)[s.layers], miss = (s) => Math.hypot(end(s)[0], end(s)[1] - 1);
const page = stage("square"), button = page.button();
const picture = scene(page.picture, {
	label: "A quarter of a circle by residual layers",
	x: [-0.7, 2],
	y: [-0.3, 2.3],
	equal: true,
	axes: { x: "first entry →", y: "second entry ↑", xTicks: [0, 1, 2], yTicks: [0, 1, 2] },
	state: DATA.state,
	handles: {
		step: {
			label: "Tip of the first step: one over the number of layers",
			tone: "s1",
			at: (s) => [1, QUARTER / s.layers],
			move: (s, [, y]) => ({ layers: clamp(Math.round(QUARTER / Math.max(y, 0.01)), 1, MOST) }),
			keys: (s, way, far) => ({ layers: clamp(s.layers + way * far, 1, MOST) }),
			say: (s) => `${s.layers} layers, ${fixed(miss(s), 3)} from the true end`,
		},
	},
	draw(pen, s) {
		const steps = path(s.layers, 1 / s.layers), long = path(2, 1);
		pen.curve(circle([0, 0], 1), { tone: "muted", width: 1.2, opacity: 0.6 });
		pen.curve(arc([0, 0], 1, 0, QUARTER), { tone: "ink", width: 2.4 });
		pen.curve(long, { tone: "muted", width: 1.4, dash: "5 4" });
		steps.slice(1).forEach((to, i) => pen.arrow(steps[i], to, { tone: "s1", width: s.layers > 12 ? 1.4 : 2.2 }));
		if (s.layers <= 16) for (const at of steps.slice(0, -1)) pen.dot(at, { tone: "s0", radius: 3.5 });
		pen.line(end(s), [0, 1], { tone: "s5", width: 2, dash: "2 3" });
		pen.dot([0, 1], { tone: "ink", radius: 5 });
		pen.dot(end(s), { tone: "s0", radius: 6.5 });
		pen.text([0, 1], "true end", { dx: -10, anchor: "end" });
		pen.text([1.06, 1.45], "steps of 1", { tone: "muted" });
		pen.text([0.08, 0.35], "the motion", { tone: "ink" });
	},
});
slider(page.controls, picture, { name: "layers", label: "Layers L", low: 1, high: MOST, step: 1, digits: 0 });
picture.play(button, { name: "layers", from: 1, to: MOST, seconds: 6, whole: true, words: ["Add layers", "Pause"] });
const error = page.number("is the distance from the true end (0, 1)", "s5");
const radius = page.number("is how far from the centre the last layer ends; it should be 1", "s0");
const count = page.number("layers, each with a step of 1 / L", "s1");
picture.watch((s) => {
	error(fixed(miss(s), 3));
	radius(fixed(Math.hypot(...end(s)), 3));
	count(String(s.layers));
});
share(picture);
