// The timeline of a trace: zoom by wheel or keys, move by dragging, find by name. No library, no network.
(() => {
  const ROW = 17, GAP = 3, PHASES = 18, TOP = 36, LABEL = 150, UNIT = 1e4; // a ms is 1e4 of the data's numbers
  const ms = (ticks) => `${(ticks / UNIT).toPrecision(4)} ms`;

  function unpacked(numbers) {
    const pieces = [];
    for (let i = 0, now = 0; i < numbers.length; i += 4) {
      const start = now + numbers[i];
      now = start + numbers[i + 1];
      pieces.push({ start, end: now, name: numbers[i + 2], count: numbers[i + 3] });
    }
    return pieces;
  }

  function rowsOf(data) {
    const rows = [];
    for (const rank of data.ranks) {
      for (const [title, numbers] of rank.tracks)
        rows.push({ title: [rank.title, title].filter(Boolean).join(", "), rank, pieces: unpacked(numbers) });
    }
    return rows;
  }

  function start(box) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const rows = rowsOf(data), canvas = box.querySelector("canvas"), pen = canvas.getContext("2d");
    const find = box.querySelector("input"), said = box.querySelector("output"), probe = box.querySelector("i");
    const tip = box.querySelector(".tip");
    const length = Math.max(1, ...rows.flatMap((row) => row.pieces.slice(-1).map((p) => p.end + row.rank.shift)));
    let from = 0, to = length, wanted = "", chosen = null, hues = {};

    const colour = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
    const x = (time) => LABEL + ((time - from) / (to - from)) * (canvas.clientWidth - LABEL);
    const time = (px) => from + ((px - LABEL) / (canvas.clientWidth - LABEL)) * (to - from);

    function colours() {
      hues = { ink: colour("ink"), faint: colour("faint"), grid: colour("grid"), accent: colour("accent"), card: colour("card") };
      data.kinds.forEach((kind, i) => {
        hues[`kind ${kind}`] = i < 11 ? colour(`series-${i + 1}`) : `hsl(${(i * 67) % 360} 55% 55%)`;
      });
    }

    function draw() {
      const scale = devicePixelRatio || 1, wide = canvas.clientWidth, high = TOP + rows.length * (ROW + GAP);
      canvas.width = wide * scale; canvas.height = high * scale; canvas.style.height = `${high}px`;
      pen.scale(scale, scale); pen.font = "11.5px system-ui, sans-serif"; pen.textBaseline = "middle";
      axis(wide, high);
      rows.forEach((row, i) => track(row, TOP + i * (ROW + GAP), wide));
    }

    function axis(wide, high) {
      const step = 10 ** Math.floor(Math.log10((to - from) / 4));
      const each = [1, 2, 5, 10].map((n) => n * step).find((n) => (to - from) / n <= 8);
      for (let t = Math.ceil(from / each) * each; t <= to; t += each) {
        pen.fillStyle = hues.grid; pen.fillRect(x(t), TOP - 4, 1, high);
        pen.fillStyle = hues.faint; pen.fillText(ms(t), Math.min(x(t) + 3, wide - 60), 8);
      }
      marks(wide, high);
    }

    // Steps and phases of the first rank, which may overlap: each from its first kernel to its last.
    function marks(wide, high) {
      const { title: rank, shift, marks } = data.ranks[0];
      const shown = marks.map(([title, a, b]) => ({ title, a: a + shift, b: b + shift })).filter(({ a, b }) => b >= from && a <= to);
      const phases = shown.filter(({ title }) => !title.startsWith("step"));
      const left = ({ a }) => Math.max(LABEL, x(a)), right = ({ b }) => Math.min(wide, x(b));
      pen.fillStyle = hues.grid; pen.globalAlpha = 0.5;
      for (const one of phases) pen.fillRect(left(one), PHASES, right(one) - left(one), 13);
      pen.fillStyle = hues.faint; pen.globalAlpha = 1; pen.fillText(rank, 0, PHASES + 7);
      for (const one of phases) {
        pen.fillRect(left(one), PHASES, 1, 13);
        if (right(one) - left(one) > 60) pen.fillText(one.title, left(one) + 4, PHASES + 7);
      }
      pen.fillStyle = hues.accent;
      for (const one of shown) if (one.title.startsWith("step") && one.a >= from) pen.fillRect(left(one), PHASES, 1.5, high);
    }

    function track(row, top, wide) {
      const shift = row.rank.shift;
      let low = 0, top_ = row.pieces.length;
      while (low < top_) { const m = (low + top_) >> 1; if (row.pieces[m].end + shift < from) low = m + 1; else top_ = m; }
      for (let drawn = -1; low < row.pieces.length; low++) {
        const piece = row.pieces[low];
        if (piece.start + shift > to) break;
        const [name, kind] = row.rank.names[piece.name];
        const a = Math.max(LABEL, x(piece.start + shift)), b = Math.min(wide, Math.max(x(piece.end + shift), a + 0.6));
        const hit = wanted && matches(name, kind);
        if (b <= drawn && !hit) continue; // nothing of it would be seen
        drawn = Math.ceil(b * 2) / 2;
        pen.globalAlpha = wanted && !hit ? 0.18 : 1;
        pen.fillStyle = hit && piece === chosen ? hues.accent : hues[`kind ${kind}`];
        pen.fillRect(a, top, b - a, ROW);
        if (piece === chosen) { pen.strokeStyle = hues.ink; pen.strokeRect(a, top, b - a, ROW); }
        if (b - a > 40) {
          pen.save(); pen.beginPath(); pen.rect(a, top, b - a - 2, ROW); pen.clip();
          pen.fillStyle = hues.card; pen.fillText(name, a + 3, top + ROW / 2); pen.restore();
        }
      }
      pen.globalAlpha = 1; pen.fillStyle = hues.card; pen.fillRect(0, top, LABEL, ROW);
      pen.fillStyle = hues.ink; pen.fillText(row.title, 0, top + ROW / 2, LABEL - 8);
    }

    const matches = (name, kind) => name.toLowerCase().includes(wanted) || kind.includes(wanted);

    function under(event) {
      const at = canvas.getBoundingClientRect(), t = time(event.clientX - at.left);
      const row = rows[Math.floor((event.clientY - at.top - TOP) / (ROW + GAP))];
      const near = ((to - from) / canvas.clientWidth) * 2;
      const inside = (p) => row && p.start + row.rank.shift - near <= t && t <= p.end + row.rank.shift + near;
      return row && { row, piece: row.pieces.find(inside) };
    }

    function told({ row, piece }) {
      const [name, kind] = row.rank.names[piece.name], many = piece.count > 1 ? ` (${piece.count})` : "";
      return `${name}${many} · ${kind} · ${ms(piece.end - piece.start)} at ${ms(piece.start + row.rank.shift)}`;
    }

    function hover(event) {
      const hit = under(event), at = box.getBoundingClientRect();
      tip.hidden = !(hit && hit.piece);
      if (tip.hidden) return;
      tip.textContent = told(hit);
      tip.style.left = `${Math.min(event.clientX - at.left, at.width - tip.offsetWidth)}px`;
      tip.style.top = `${event.clientY - at.top + 16}px`;
    }

    // The next piece that the search finds, after the one that was chosen, in the middle of the view.
    function next() {
      const found = rows.flatMap((row) => row.pieces.filter((p) => matches(...row.rank.names[p.name])).map((piece) => ({ row, piece })));
      const hit = found[(found.findIndex((one) => one.piece === chosen) + 1) % found.length];
      if (!wanted || !hit) return;
      const span = Math.min(to - from, Math.max(length / 50, 4 * (hit.piece.end - hit.piece.start)));
      const middle = (hit.piece.start + hit.piece.end) / 2 + hit.row.rank.shift;
      chosen = hit.piece; said.textContent = told(hit); move(middle - span / 2, middle + span / 2);
    }

    function search() {
      wanted = find.value.trim().toLowerCase();
      let count = 0, sum = 0;
      for (const row of rows) for (const piece of row.pieces)
        if (wanted && matches(...row.rank.names[piece.name])) { count += piece.count; sum += piece.end - piece.start; }
      said.textContent = wanted ? `${count} found, ${ms(sum)}` : "";
      draw();
    }

    function move(a, b) {
      const span = Math.min(length, Math.max(20, b - a));
      from = Math.max(0, Math.min(a, length - span)); to = from + span; draw();
    }

    function zoom(factor, at) { move(at - (at - from) * factor, at + (to - at) * factor); }

    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && event.deltaX === 0 && document.activeElement !== canvas) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.focus(); canvas.setPointerCapture(event.pointerId);
      const [at, a, b] = [event.clientX, from, to];
      let moved = false;
      canvas.onpointermove = (next) => {
        const by = ((at - next.clientX) / (canvas.clientWidth - LABEL)) * (b - a);
        if (moved ||= Math.abs(next.clientX - at) > 3) move(a + by, b + by);
      };
      canvas.onpointerup = (up) => {
        canvas.onpointermove = hover; canvas.onpointerup = null;
        const hit = under(up);
        if (!moved && hit && hit.piece) { chosen = hit.piece; said.textContent = told(hit); draw(); }
      };
    });
    canvas.onpointermove = hover;
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => zoom(0.25, time(event.offsetX)));
    canvas.addEventListener("keydown", (event) => {
      const span = to - from, keys = {
        ArrowLeft: [from - span / 5, to - span / 5], ArrowRight: [from + span / 5, to + span / 5],
        "+": [from + span / 4, to - span / 4], "-": [from - span / 2, to + span / 2], 0: [0, length],
      };
      if (keys[event.key]) { event.preventDefault(); move(...keys[event.key]); }
    });
    find.addEventListener("input", search);
    find.addEventListener("keydown", (event) => { if (event.key === "Enter") next(); });
    box.querySelector("button").addEventListener("click", () => move(0, length));
    const again = () => { colours(); draw(); };
    new ResizeObserver(draw).observe(canvas.parentElement);
    new MutationObserver(again).observe(document.documentElement, { attributes: true });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    again();
  }

  for (const box of document.querySelectorAll(".trace-timeline:not([data-drawn])")) { box.dataset.drawn = ""; start(box); }
})();
