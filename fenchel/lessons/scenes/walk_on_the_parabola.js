// Gradient descent on x squared: along the arrow by the learning rate times the slope, then down or
// up to the curve. The tip of the first arrow is grasped, and with it the learning rate.
const { low, high, steps, frame } = DATA; // of the rate; how many steps; x and y of the frame
const walk = (s) => range(steps).reduce((path, i) => [...path, path[i] - s.rate * 2 * path[i]], [s.start]);
const page = stage(), button = page.button();
const picture = scene(page.picture, {
	label: "A walk down the parabola: every step goes against the slope",
	...frame,
	ratio: 0.66,
	ratioNarrow: 0.95,
	axes: { x: "x →", y: "height x² ↑", xTicks: DATA.xTicks, yTicks: DATA.yTicks },
	state: DATA.state,
	handles: {
		start: {
			label: "Where the walk starts",
			tone: "s0",
			at: (s) => [s.start, s.start ** 2],
			move: (s, [x]) => ({ start: clamp(Math.round(10 * x) / 10, 0.5, 3) }),
			step: [0.1, 0],
			say: (s) => `start ${fixed(s.start, 1)}`,
		},
		rate: {
			label: "Tip of the first step: the learning rate",
			tone: "s1",
			at: (s) => [s.start * (1 - 2 * s.rate), s.start ** 2],
			move: (s, [x]) => ({ rate: clamp(Math.round((50 * (s.start - x)) / s.start) / 100, low, high) }),
			keys: (s, way, far) => ({ rate: clamp(+(s.rate + 0.01 * way * far).toFixed(2), low, high) }),
			say: (s) => `learning rate ${fixed(s.rate)}`,
		},
	},
	draw(pen, s) {
		const path = walk(s), at = path[s.steps], slope = 2 * at;
		pen.curve(between(frame.x[0], frame.x[1], 121).map((x) => [x, x * x]), { width: 2 });
		path.slice(0, s.steps + 1).forEach((x, i) => {
			if (i < s.steps || s.steps === 0) {
				const next = path[i + 1], faint = { tone: "s1", opacity: i ? 0.55 : 1 };
				pen.line([x, x * x], [next, x * x], { ...faint, width: 2 });
				pen.line([next, x * x], [next, next * next], { ...faint, width: 1.2, dash: "3 4" });
			}
			if (i < s.steps) pen.dot([x, x * x], { tone: "s0", radius: 4, opacity: 0.55 });
		});
		const reach = 0.22 * (frame.x[1] - frame.x[0]), inside = at * at < frame.y[1];
		pen.line([at - reach, at * at - reach * slope], [at + reach, at * at + reach * slope], { tone: "muted", dash: "5 4" });
		pen.dot([at, at * at], { tone: "s0", radius: 8 });
		const beside = { dx: at < 0 ? -14 : 14, dy: at * at < 0.1 * frame.y[1] ? -18 : 18, anchor: at < 0 ? "end" : "start" };
		if (inside) pen.text([at, at * at], `slope ${fixed(slope)}`, beside);
		const tip = s.start * (1 - 2 * s.rate);
		if (tip > frame.x[0]) pen.text([tip, s.start ** 2], `η = ${fixed(s.rate)}`, { tone: "s1", dx: 0, dy: -20, anchor: "middle", bold: true });
	},
});
slider(page.controls, picture, { name: "rate", label: "Learning rate η", low, high, step: 0.01 });
slider(page.controls, picture, { name: "steps", label: "Steps", low: 0, high: steps, step: 1, digits: 0 });
picture.play(button, { name: "steps", from: 0, to: steps, seconds: 6, whole: true, words: ["Walk", "Pause"] });
const place = page.number("is where the walk stands, the filled ball", "s0");
const factor = page.number("of the way to 0 is left over by each step: 1 − 2η", "s1");
const height = page.number("is its height");
picture.watch((s) => {
	const at = walk(s)[s.steps], shown = (v) => (Math.abs(v) < 9999 ? fixed(v, Math.abs(v) < 100 ? 4 : 0) : v.toExponential(1));
	place(shown(at));
	factor(fixed(1 - 2 * s.rate));
	height(shown(at * at));
});
share(picture, ["rate", "start"]);
