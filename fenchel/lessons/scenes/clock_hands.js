// Two positions m and n = m + gap on a ruler, and clocks of different speeds: each has one hand for m and one
// for n. When both positions move on together, no angle between hands changes. DATA.pairs has
// [speed, hand of m at position 0, hand of n at position 0] for every clock, DATA.shown the drawn ones,
// DATA.turn the sense of rotation (1: anticlockwise), DATA.top the last position.
const turned = ([x, y], angle) => [x * Math.cos(angle) - y * Math.sin(angle), x * Math.sin(angle) + y * Math.cos(angle)];
const n = (s) => s.m + s.gap;
const hands = (s, [speed, first, second]) => [turned(first, DATA.turn * s.m * speed), turned(second, DATA.turn * n(s) * speed)];
const score = (s) => DATA.pairs.reduce((sum, pair) => sum + dot(...hands(s, pair)), 0);
const CENTRES = range(4).map((i) => [0.62 + 1.25 * i, 1.02]), LEFT = 0.25, RIGHT = 4.75;
const toRuler = (position) => LEFT + ((RIGHT - LEFT) * position) / DATA.top;
const fromRuler = (x) => Math.round(clamp(((x - LEFT) / (RIGHT - LEFT)) * DATA.top, 0, DATA.top));
const longest = Math.max(...DATA.shown.flatMap((i) => DATA.pairs[i].slice(1).map((hand) => Math.hypot(...hand))));
const mark = (letter, tone, position, patch) => ({
	label: `Position ${letter}`,
	letter,
	tone,
	at: (s) => [toRuler(position(s)), 0],
	move: (s, [x]) => patch(s, fromRuler(x)),
	keys: (s, way, far) => patch(s, clamp(position(s) + way * far, 0, DATA.top)),
	say: (s) => `position ${position(s)}, product ${fixed(score(s), 3)}`,
});
const page = stage("wide"), button = page.button();
const picture = scene(page.picture, {
	label: "Four clocks with a hand for each of two positions",
	x: [0, 5],
	y: [-0.42, 1.75],
	equal: true,
	open: true,
	margin: { left: 4, right: 4, top: 4, bottom: 4 },
	state: DATA.state,
	handles: {
		m: mark("m", "s0", (s) => s.m, (s, m) => ({ m, gap: n(s) - m })),
		n: mark("n", "s1", n, (s, to) => ({ gap: to - s.m })),
	},
	draw(pen, s) {
		pen.line([LEFT, 0], [RIGHT, 0], { tone: "muted", width: 1.5 });
		for (const position of range(5).map((i) => (DATA.top * i) / 4)) {
			pen.line([toRuler(position), -0.05], [toRuler(position), 0.05], { tone: "muted", width: 1.5 });
			pen.text([toRuler(position), -0.27], String(position), { tone: "muted", anchor: "middle" });
		}
		DATA.shown.forEach((index, i) => {
			const at = CENTRES[i], pair = DATA.pairs[index], [first, second] = hands(s, pair);
			const tip = ([x, y]) => [at[0] + (0.5 * x) / longest, at[1] + (0.5 * y) / longest];
			const start = Math.atan2(first[1], first[0]);
			let angle = Math.atan2(second[1], second[0]) - start;
			angle -= 2 * Math.PI * Math.round(angle / (2 * Math.PI));
			pen.curve(circle(at, 0.53), { tone: "muted", width: 1.2, opacity: 0.6 });
			pen.region([at, ...arc(at, 0.2, start, start + angle, 31)], { tone: "s3", opacity: 0.3 });
			pen.arrow(at, tip(first), { tone: "s0", width: 2.6 });
			pen.arrow(at, tip(second), { tone: "s1", width: 2.6 });
			pen.text([at[0], at[1] + 0.66], DATA.names[i], { anchor: "middle", tone: "muted", size: pen.narrow ? 11 : 13 });
			const degrees = `${fixed((Math.abs(angle) * 180) / Math.PI, 0)}°`;
			pen.text([at[0], at[1] - 0.66], degrees, { anchor: "middle", tone: "s3", bold: true });
		});
	},
});
const ends = { from: (s) => Math.max(0, -s.gap), to: (s) => DATA.top - Math.max(0, s.gap) };
picture.play(button, { name: "m", ...ends, seconds: 7, whole: true, words: ["Move both on", "Pause"] });
picture.watch((s) => {
	const apart = Math.abs(s.gap);
	page.says.textContent = `Positions ${s.m} and ${n(s)}, ${apart} ${apart === 1 ? "token" : "tokens"} apart: the product over all ${DATA.pairs.length} clocks is ${fixed(score(s), 3)}.`;
});
share(picture);
