// What a reader does in a lesson beside its code: a question by pencil, one by choice, recap cards; and the page
// that says what was mastered. ladder.py writes the markup with every sentence in it; this script shows and hides.
//
// progress.of(name) is the record of a lesson, progress.patch(name, fields) changes it; both once progress.ready is
// fulfilled. A page of files keeps records in this browser's IndexedDB, one entry per lesson: Chromium gives pages
// opened as files a localStorage per process, which the next page may not share. `fenchel learn` gives them in the
// data block (`records`) and takes patches at /progress/NAME. A record has the fields of `Record` in course.py; a field
// that is not of its type counts as absent.

const progress = (() => {
	const EMPTY = { opened: false, prediction: "", pencil: "", pencil_tries: 0, pencil_right: false, choice: "", choice_tries: 0, choice_right: false, code: "", tries: 0, hints: 0, solved: false, cards: {} };
	const { records: served } = JSON.parse(document.getElementById("data").textContent), known = {};
	const isCard = (card) => Number.isInteger(card?.box) && card.box >= 0 && /^\d{4}-\d\d-\d\d$/.test(card.due);
	function sound(given) {
		const record = { ...EMPTY, cards: {} };
		if (typeof given !== "object" || given === null) return record;
		for (const key in EMPTY) if (key !== "cards" && typeof given[key] === typeof EMPTY[key]) record[key] = given[key];
		for (const [key, card] of Object.entries(given.cards ?? {})) if (/^\d$/.test(key) && isCard(card)) record.cards[key] = { box: card.box, due: card.due };
		return record;
	}
	const result = (request) => new Promise((done, failed) => {
		request.onsuccess = () => done(request.result);
		request.onerror = () => failed(request.error);
	});
	let database = null;
	async function read() {
		const opening = indexedDB.open("fenchel", 1);
		opening.onupgradeneeded = () => opening.result.createObjectStore("lessons");
		database = await result(opening);
		const lessons = database.transaction("lessons").objectStore("lessons");
		const [names, records] = await Promise.all([result(lessons.getAllKeys()), result(lessons.getAll())]);
		names.forEach((name, i) => (known[name] = sound(records[i])));
	}
	function store(name) {
		const change = database.transaction("lessons", "readwrite"), put = result(change.objectStore("lessons").put(of(name), name));
		change.commit(); // a page that is left at once would take it back
		return put;
	}
	const of = (name) => (known[name] ??= sound(served?.[name]));
	async function patch(name, fields) {
		Object.assign(of(name), fields);
		try {
			if (!served) return await store(name);
			const answer = await parent.fetch(`/progress/${name}`, { method: "POST", body: JSON.stringify(fields) });
			if (!answer.ok) throw new Error(await answer.text());
		} catch { // storage is switched off, or the server has ended: the page works without
			for (const note of document.querySelectorAll(".unkept")) note.hidden = false;
		}
		return undefined;
	}
	// What a reader can do in a lesson, code last: three of the four need no program.
	const steps = (name) => ({ prediction: of(name).prediction !== "", pencil: of(name).pencil_right, choice: of(name).choice_right, code: of(name).solved });
	return { of, patch, steps, ready: served ? Promise.resolve() : read().catch(() => undefined) };
})();

progress.ready.then(() => {
	const TRIES = 2, BACK = [1, 3, 7], MOST = 6, DAYS = [0, 1, 3, 7, 21, 60];
	const day = (later = 0) => {
		const date = new Date(Date.now() + later * 864e5);
		return new Date(date - date.getTimezoneOffset() * 6e4).toISOString().slice(0, 10);
	};
	const all = (host, selector) => [...host.querySelectorAll(selector)];

	// A number as people write it: 0.25, ,25, 1/4, 25 %, 1,024. undefined if it is none.
	function number(text) {
		const plain = text.trim().replace(/\u2212/g, "-").replace(/\s/g, "");
		const [, sign, body, percent] = plain.match(/^([-+]?)(.*?)(%?)$/);
		const part = (piece) => {
			const written = /^\d{1,3}(,\d{3})+(\.\d*)?$/.test(piece) ? piece.replace(/,/g, "") : piece.replace(",", ".");
			return /^(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(written) ? +written : NaN;
		};
		const pieces = body.split("/").map(part), value = pieces.length === 1 ? pieces[0] : pieces.length === 2 ? pieces[0] / pieces[1] : NaN;
		return Number.isFinite(value) ? (sign === "-" ? -1 : 1) * value / (percent ? 100 : 1) : undefined;
	}

	function step(host, name) { // a question by pencil or by choice
		const kind = host.dataset.step, part = (selector) => host.querySelector(selector);
		const said = part(".said"), hints = all(host, ".hints li"), hint = part(".hint"), reveal = part(".reveal"), field = part("input[type=text]");
		const given = () => (field ? field.value : part("input:checked")?.value ?? "");
		let open = 0;
		function show() {
			const record = progress.of(name), right = record[`${kind}_right`], tries = record[`${kind}_tries`];
			host.classList.toggle("done", right);
			part(".why").hidden = !right && !host.dataset.revealed;
			reveal.hidden = right || tries < TRIES || Boolean(host.dataset.revealed);
			hints.forEach((each, i) => (each.hidden = i >= open));
			if (hint) {
				hint.hidden = right || open === hints.length;
				hint.textContent = `A hint (${open + 1} of ${hints.length})`;
			}
		}
		function check() {
			const text = given(), record = progress.of(name), value = field ? number(text) : text;
			all(host, ".slips li").forEach((each) => (each.hidden = true));
			if (value === undefined || text === "") {
				said.textContent = field ? "Write a number, such as 0.25, 1/4 or 25 %." : "Choose an answer first.";
				return;
			}
			const near = (at, slack) => Math.abs(value - at) <= slack * (1 + 1e-9);
			const right = field ? near(+host.dataset.answer, +host.dataset.tolerance) : value === host.dataset.right;
			const slip = field && !right && all(host, ".slips li").find((each) => near(+each.dataset.value, Math.max(+host.dataset.tolerance, 1e-3 * Math.abs(+each.dataset.value))));
			if (slip) slip.hidden = false;
			const tries = record[`${kind}_tries`] + !right, left = TRIES - tries;
			said.textContent = right ? "Right." : slip ? "Not yet." : left > 0 ? "Not yet. Try once more." : "Not yet.";
			host.classList.toggle("missed", !right);
			progress.patch(name, { [kind]: text, [`${kind}_tries`]: tries, [`${kind}_right`]: record[`${kind}_right`] || right });
			show();
		}
		const kept = progress.of(name)[kind];
		if (field) field.value = kept;
		else for (const each of all(host, "input")) each.checked = each.value === kept;
		if (progress.of(name)[`${kind}_right`]) said.textContent = "Right.";
		part(".check").addEventListener("click", check);
		field?.addEventListener("keydown", (event) => event.key === "Enter" && check());
		hint?.addEventListener("click", () => {
			open += 1;
			show();
		});
		reveal.addEventListener("click", () => {
			host.dataset.revealed = "yes";
			show();
		});
		show();
	}

	function card(host) {
		const { lesson, card: index } = host.dataset, part = (selector) => host.querySelector(selector);
		const turn = part(".turn"), back = part(".back"), said = part(".said");
		turn.addEventListener("click", () => {
			turn.hidden = true;
			back.hidden = false;
		});
		for (const button of all(host, "[data-known]")) button.addEventListener("click", () => {
			const { cards } = progress.of(lesson), knew = button.dataset.known === "yes";
			const box = knew ? Math.min((cards[index]?.box ?? 0) + 1, DAYS.length - 1) : 0;
			progress.patch(lesson, { cards: { ...cards, [index]: { box, due: day(DAYS[box]) } } });
			said.textContent = knew ? `It comes back after ${DAYS[box]} day${DAYS[box] === 1 ? "" : "s"}.` : "It comes back at the end of the next lesson.";
			part(".buttons").hidden = true;
		});
	}

	// Of earlier lessons: cards of those 1, 3 and 7 places back that were not answered today, and cards that are due.
	function returns(host, here) {
		const { lesson, card: index, place } = host.dataset, record = progress.of(lesson), seen = record.cards[index];
		if (+place >= here || !record.opened) return false;
		return seen ? seen.due <= day() : BACK.includes(here - place);
	}

	for (const ladder of document.querySelectorAll(".ladder")) for (const host of all(ladder, "[data-step]")) step(host, ladder.dataset.lesson);
	for (const recap of document.querySelectorAll(".recap")) {
		const { lesson, place } = recap.dataset, earlier = all(recap, ".earlier .card");
		progress.patch(lesson, { opened: true });
		const weak = (host) => progress.of(host.dataset.lesson).cards[host.dataset.card]?.box === 0;
		const chosen = earlier.filter((host) => returns(host, +place)).sort((a, b) => weak(b) - weak(a) || b.dataset.place - a.dataset.place).slice(0, MOST);
		earlier.forEach((host) => (host.hidden = !chosen.includes(host)));
		recap.querySelector(".earlier").hidden = chosen.length === 0;
		all(recap, ".card").forEach(card);
	}

	// The list and the page of what was mastered.
	const plural = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
	const lessons = all(document, "[data-lesson].entry").map((host) => host.dataset.lesson);
	for (const host of document.querySelectorAll("[data-lesson].entry")) {
		const name = host.dataset.lesson, done = progress.steps(name), cards = Object.values(progress.of(name).cards);
		for (const mark of all(host, "[data-done]")) {
			mark.classList.toggle("yes", done[mark.dataset.done]);
			mark.querySelector(".state").textContent = done[mark.dataset.done] ? "done" : "open";
		}
		for (const mark of all(host, "[data-solved]")) mark.hidden = !done.code;
		for (const mark of all(host, ".known")) mark.textContent = `${cards.filter(({ box }) => box > 0).length} of ${mark.dataset.of}`;
		host.dataset.mastered = done.pencil && done.choice && cards.filter(({ box }) => box > 0).length >= 3 ? "yes" : "no";
	}
	const total = (kind) => lessons.filter((name) => progress.steps(name)[kind]).length;
	for (const count of document.querySelectorAll(".count")) {
		count.textContent = `${total("code")} of ${lessons.length} exercises solved. Without code: ${plural(total("prediction"), "prediction")}, ${plural(total("pencil"), "question")} by pencil, ${total("choice")} by choice.`;
	}
	for (const page of document.querySelectorAll(".mastery")) {
		const mastered = all(page, "[data-mastered=yes]").length, shown = (selector, wanted) => {
			const hosts = all(page, selector);
			hosts.forEach((host) => (host.hidden = !wanted(host)));
			return hosts.some((host) => !host.hidden);
		};
		page.querySelector(".sum").textContent = mastered === lessons.length ? "You have mastered the whole course." : `${plural(mastered, "lesson")} mastered of ${lessons.length}: both questions right and three cards known.`;
		const weak = shown(".weak .card", ({ dataset }) => progress.of(dataset.lesson).cards[dataset.card]?.box === 0);
		const open = shown(".missed-questions li", ({ dataset }) => progress.of(dataset.lesson)[`${dataset.step}_tries`] > 0 && !progress.of(dataset.lesson)[`${dataset.step}_right`]);
		page.querySelector(".weak").hidden = !weak;
		page.querySelector(".missed-questions").hidden = !open;
		all(page, ".card").forEach(card);
	}
	document.documentElement.dataset.progress = "shown";
});
