// Fills every [data-picture] from the JSON block by the view that its data names.

function mount(root) {
	const { pictures } = JSON.parse(root.getElementById("data").textContent);
	const more = { ...(typeof heat === "undefined" ? {} : { heat, intervals }), ...(typeof laws === "undefined" ? {} : { laws }) }; // heat_map.js and lens.js are part of some pages only
	const views = { lineChart, bars, strips, attention, ...more }, state = { axis: "step" }, drawings = new Map(), widths = new Map();
	for (const host of root.querySelectorAll("[data-picture]")) {
		const data = pictures[host.dataset.picture];
		drawings.set(host, views[data.view](host, data, state));
	}
	const all = () => drawings.forEach((draw) => draw());
	const fit = () => drawings.forEach((draw, host) => {
		if (widths.get(host) === host.clientWidth) return;
		widths.set(host, host.clientWidth);
		draw();
	});
	fit();
	addEventListener("resize", fit);
	for (const input of root.querySelectorAll("input[name=axis]"))
		input.addEventListener("change", () => {
			state.axis = input.value;
			all();
		});
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
	for (const [event, paper] of [["beforeprint", true], ["afterprint", false]])
		addEventListener(event, () => {
			root.documentElement.classList.toggle("paper", paper);
			all();
		});
}

// Copies by the selection where a browser keeps the clipboard from files; the command is then marked, to copy by hand.
function copyButton(item) {
	const code = item.querySelector("code"), button = node("button", { type: "button", "aria-label": `Copy ${code.textContent}` }, "Copy");
	button.addEventListener("click", async () => {
		try {
			await navigator.clipboard.writeText(code.textContent);
		} catch {
			getSelection().selectAllChildren(code);
			if (!document.execCommand("copy")) return;
		}
		button.textContent = "Copied";
	});
	item.append(button);
}

mount(document);
document.querySelectorAll(".commands li").forEach(copyButton);
