// The map of a hill with its summit at (2, 2), rings of equal height, and a fence x + y = b. With
// DATA.oneSided the fence is moved and the best place on its near side is shown with the push of the
// fence; otherwise the walker is moved along the fence.
const below = (x, y) => (x - 2) ** 2 + 2 * (y - 2) ** 2, uphill = ([x, y]) => [2 * (2 - x), 4 * (2 - y)];
const ROOT = Math.SQRT1_2, SCALE = 0.12; // a unit along the fence is (ROOT, -ROOT); metres of arrow per unit of slope
const short = (s) => Math.max(0, 4 - s.b), push = (s) => (4 * short(s)) / 3; // the multiplier
const best = (s) => [2 - (2 * short(s)) / 3, 2 - short(s) / 3];
const stand = (s) => (DATA.oneSided ? best(s) : [s.x, s.b - s.x]);
const along = (at) => dot(uphill(at), [ROOT, -ROOT]), across = (at) => dot(uphill(at), [ROOT, ROOT]);
const ahead = (at, way, far) => [at[0] + SCALE * far * way[0], at[1] + SCALE * far * way[1]];

const handles = DATA.oneSided
	? {
			fence: {
				label: "Position of the fence",
				tone: "s3",
				at: (s) => [s.b / 2 + 1.4, s.b / 2 - 1.4],
				move: (s, [x, y]) => ({ b: clamp(Math.round(4 * (x + y)) / 4, 0, 5) }),
				keys: (s, way, far) => ({ b: clamp(s.b + 0.25 * way * far, 0, 5) }),
				say: (s) => `fence at ${fixed(s.b)}, push ${fixed(push(s))}`,
			},
		}
	: {
			walker: {
				label: "Where you stand on the fence",
				tone: "s0",
				at: stand,
				move: (s, [x, y]) => ({ x: clamp(Math.round(10 * (x - y + s.b)) / 20, -1.5, 1.5) }),
				keys: (s, way, far) => ({ x: clamp(+(s.x + 0.05 * way * far).toFixed(2), -1.5, 1.5) }),
				say: (s) => `x ${fixed(s.x)}, slope along the fence ${fixed(along(stand(s)))}`,
			},
		};
const page = stage("square"), button = page.button();
const picture = scene(page.picture, {
	label: "Map of the hill: rings of equal height, the fence, and where you stand",
	x: [-2, 4.5],
	y: [-2, 4.5],
	equal: true,
	axes: { x: "x →", y: "y ↑", xTicks: [-2, -1, 0, 1, 2, 3, 4], yTicks: [-2, -1, 0, 1, 2, 3, 4] },
	state: DATA.state,
	handles,
	draw(pen, s) {
		const at = stand(s), slope = uphill(at), size = Math.hypot(...slope);
		if (DATA.oneSided) pen.region([[s.b + 4, -4], [-6, s.b + 6], [-6, -4]], { tone: "s3", opacity: 0.1 });
		pen.contours(below, [1, 3, 10, 15, 21, 28], { tone: "muted", opacity: 0.55, key: "hill" });
		pen.contours(below, [below(...at)], { tone: "s0", width: 2.4, key: "hill" });
		pen.line([s.b + 4, -4], [-4, s.b + 4], { tone: "s3", width: 3 });
		pen.dot([2, 2], { tone: "ink", radius: 4 });
		pen.text([2, 2], "summit", { dx: 9, dy: -12 });
		pen.text([s.b / 2 + 1.8, s.b / 2 - 1.8], "fence", { tone: "s3", bold: true, dx: -12, dy: 12, anchor: "end" });
		if (DATA.oneSided) {
			const reach = ahead(at, [ROOT, ROOT], across(at)), back = ahead(at, [-ROOT, -ROOT], across(at));
			if (short(s) > 0.1) {
				pen.arrow(at, reach, { tone: "s1", width: 3 });
				pen.arrow(at, back, { tone: "s3", width: 3 });
				pen.text(reach, "slope", { tone: "s1", bold: true, dx: 10, dy: 0 });
				pen.text(back, `push ${fixed(push(s))}`, { tone: "s3", bold: true, dx: -8, dy: 4, anchor: "end" });
			}
			pen.dot(at, { tone: "s0", radius: 7 });
			return;
		}
		const side = ahead(at, [ROOT, -ROOT], along(at)), over = ahead(at, [ROOT, ROOT], across(at));
		pen.line(ahead(at, slope, 1), side, { tone: "muted", width: 1, dash: "2 4" });
		pen.line(ahead(at, slope, 1), over, { tone: "muted", width: 1, dash: "2 4" });
		pen.arrow(at, over, { tone: "s2", width: 2.2 });
		pen.arrow(at, side, { tone: "s1", width: 3.4 });
		pen.arrow(at, ahead(at, slope, 1), { tone: "s0", width: 2.2 });
		pen.text(ahead(at, slope, 1 + 1.4 / size), "uphill", { tone: "s0", bold: true, anchor: "middle" });
	},
});
const depth = page.number("metres below the summit: the blue ring", "s0");
if (DATA.oneSided) {
	slider(page.controls, picture, { name: "b", label: "Position b of the fence", low: 0, high: 5, step: 0.25 });
	picture.play(button, { name: "b", from: 0, to: 5, seconds: 6, words: ["Move the fence", "Pause"] });
	const room = page.number("room left between you and the fence, −g"), force = page.number("push of the fence, μ", "s3");
	picture.watch((s) => {
		depth(fixed(below(...best(s))));
		room(fixed(Math.max(0, s.b - 4)));
		force(fixed(push(s)));
	});
} else {
	slider(page.controls, picture, { name: "x", label: "Your x on the fence", low: -1.5, high: 1.5, step: 0.05 });
	picture.play(button, { name: "x", from: -1.5, to: 1.5, seconds: 6, words: ["Walk along", "Pause"] });
	const rise = page.number("slope along the fence, the orange arrow", "s1");
	const rest = page.number("slope across it, the green arrow: the fence is in its way", "s2");
	picture.watch((s) => {
		depth(fixed(below(...stand(s))));
		rise(fixed(along(stand(s))));
		rest(fixed(across(stand(s))));
	});
}
share(picture);
