// The mixing desk: one degree of the first knob changes the loudness by `gear`, one of the second by
// 1. The steps that change the loudness by 1 are a circle in loudness and an ellipse in degrees. The
// plain gradient is steepest in degrees, the best step in loudness; both are drawn in both frames.
const SCALE = 1.25, unit = ([x, y]) => [x / Math.hypot(x, y), y / Math.hypot(x, y)];
const degrees = (s, [a, b]) => [a / s.gear, b], gain = ([a, b]) => -(a + b); // of a step in loudness
const gradient = (s) => unit([-(s.gear ** 2), -1]), best = unit([-1, -1]);
const mine = (s) => [Math.cos(s.angle * (Math.PI / 180)), Math.sin(s.angle * (Math.PI / 180))];
const reached = (s) => gain(gradient(s)) / gain(best);
const held = store(DATA.state), page = stage("wide"), button = page.button();
const pair = page.picture.appendChild(node("div", { class: "pair" }));
const frame = (label, axes, toFrame, fromFrame) =>
	scene(pair.appendChild(node("div")), {
		label,
		store: held,
		x: [-SCALE, SCALE],
		y: [-SCALE, SCALE],
		equal: true,
		margin: { left: 34, right: 8 },
		axes: { ...axes, xTicks: [-1, 0, 1], yTicks: [-1, 0, 1] },
		handles: {
			step: {
				label: `Your step, ${label}`,
				tone: "s3",
				at: (s) => toFrame(s, mine(s)),
				move(s, at) {
					const [a, b] = fromFrame(s, at);
					return { angle: (Math.round((Math.atan2(b, a) * 180) / Math.PI) + 360) % 360 };
				},
				keys: (s, way, far) => ({ angle: (s.angle + way * far + 360) % 360 }),
				say: (s) => `${fixed(s.angle, 0)} degrees, descent ${fixed(gain(mine(s)))}`,
			},
		},
		draw(pen, s) {
			// Lines of equal trouble a + b: straight in both frames.
			for (const level of [-2, -1, 0, 1, 2])
				pen.line(toFrame(s, [level + 20, -20]), toFrame(s, [level - 20, 20]), { tone: "muted", width: 0.9, opacity: 0.5 });
			const round = circle([0, 0], 1).map((step) => toFrame(s, step));
			pen.region(round, { tone: "muted", opacity: 0.12 });
			pen.curve(round, { tone: "ink", width: 1.8 });
			pen.arrow([0, 0], toFrame(s, mine(s)), { tone: "s3", width: 2 });
			pen.arrow([0, 0], toFrame(s, gradient(s)), { tone: "s1", width: 3 });
			pen.arrow([0, 0], toFrame(s, best), { tone: "s0", width: 3 });
		},
	});
frame("in loudness", { x: "singer →", y: "In loudness: piano ↑" }, (s, step) => step, (s, at) => at);
frame("in degrees", { x: "first knob →", y: "In degrees: second knob ↑" }, degrees, (s, [p, q]) => [p * s.gear, q]);
slider(page.controls, held, { name: "gear", label: "Gear of the first knob", low: 1, high: 10, digits: 1 });
held.play(button, { name: "gear", from: 1, to: 10, seconds: 6, words: ["Shift up", "Pause"] });
const row = page.side.appendChild(node("div", { class: "row" }));
const numbers = [["best step", "s0"], ["plain gradient", "s1"], ["yours", "s3"]].map(([text, tone]) => {
	const value = node("span", { class: `big ${tone}` });
	row.append(node("p", {}, value, `less trouble: ${text}`));
	return (shown) => (value.textContent = shown);
});
held.watch((s) => {
	[best, gradient(s), mine(s)].forEach((step, i) => numbers[i](fixed(gain(step), 3)));
	page.says.textContent = `The plain gradient reaches ${fixed(100 * reached(s), 0)} % of the best descent at the same change of loudness.`;
});
share(held);
