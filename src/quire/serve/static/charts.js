// Small canvases: lines over time with an optional limit, bars of steps, cells of pages. Colours come from the style sheet.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A canvas as sharp as the screen: returns its context, and its size in CSS pixels.
function surface(canvas, height) {
  const width = canvas.clientWidth || 300;
  const tall = height ?? (canvas.clientHeight || 150);
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  if (height) canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return { pen, width, height: tall };
}

function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 8, 10].map((step) => step * power).find((bound) => bound >= value * 0.999);
}

const short = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toPrecision(3)}`);

// series: [{ label, colour, values }], values oldest first, null where there was nothing.
export function lines(canvas, series, { limit = null, span = 120, seconds = 60 } = {}) {
  const { pen, width, height } = surface(canvas);
  const left = 38, right = 8, top = 20, bottom = 16;
  const most = ceiling(Math.max(limit ? limit * 1.1 : 0, ...series.flatMap((s) => s.values.filter((v) => v !== null)), 0));
  const x = (i, count) => left + ((span - count + i + 0.5) / span) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("soft");
  pen.textAlign = "right";
  for (const part of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(left, y(part * most));
    pen.lineTo(width - right, y(part * most));
    pen.stroke();
    pen.fillText(short(part * most), left - 5, y(part * most) + 4);
  }
  pen.fillText("now", width - right, height - 3);
  pen.textAlign = "left";
  pen.fillText(`${seconds} s ago`, left, height - 3);
  let at = left;
  for (const { label, colour: ink, values } of series) {
    pen.fillStyle = pen.strokeStyle = ink;
    pen.fillRect(at, 5, 9, 9);
    const latest = values.findLast((v) => v !== null);
    const text = latest === undefined ? label : `${label} ${short(latest)}`;
    pen.fillText(text, at + 13, 13);
    at += pen.measureText(text).width + 30;
    pen.lineWidth = 1.8;
    pen.lineJoin = pen.lineCap = "round";
    pen.beginPath();
    let drawing = false;
    values.forEach((value, i) => {
      if (value === null) { drawing = false; return; }
      pen[drawing ? "lineTo" : "moveTo"](x(i, values.length), y(value));
      if (!drawing) pen.lineTo(x(i, values.length) + 0.8, y(value));
      drawing = true;
    });
    pen.stroke();
  }
  if (limit) {
    pen.setLineDash([5, 4]);
    pen.lineWidth = 1.2;
    pen.strokeStyle = pen.fillStyle = colour("danger");
    pen.beginPath();
    pen.moveTo(left, y(limit));
    pen.lineTo(width - right, y(limit));
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "right";
    pen.fillText(`SLO ${short(limit)}`, width - right, y(limit) - 4);
  }
  canvas.dataset.points = series[0].values.filter((value) => value !== null).length;
  canvas.setAttribute("aria-label", series.map((s) => `${s.label} ${s.values.at(-1) ?? "none"}`).join(", "));
}

// steps: [[rows, tokens]]; bars of tokens against the budget, dots of rows against the slots.
export function bars(canvas, steps, budget, slots) {
  const { pen, width, height } = surface(canvas);
  const top = 20, bottom = 4, span = 240;
  const most = ceiling(Math.max(8, ...steps.map(([, tokens]) => tokens)));
  const wide = width / span;
  pen.fillStyle = colour("bar");
  pen.fillRect(0, 5, 9, 9);
  const last = steps.at(-1) || [0, 0];
  pen.fillText(`tokens ${last[1]} of ${short(budget)}`, 13, 13);
  const crowd = ceiling(Math.max(1, ...steps.map(([rows]) => rows)));
  pen.fillStyle = colour("bar2");
  pen.fillRect(150, 5, 9, 9);
  pen.fillText(`rows ${last[0]} of ${short(slots)}`, 163, 13);
  pen.fillStyle = colour("soft");
  pen.textAlign = "right";
  if (width > 420) pen.fillText(`top: ${short(most)} tokens, ${short(crowd)} ${crowd === 1 ? "row" : "rows"}`, width, 13);
  steps.forEach(([rows, tokens], i) => {
    const x = width - (steps.length - i) * wide;
    const tall = (tokens / most) * (height - top - bottom);
    pen.fillStyle = colour("bar");
    pen.globalAlpha = 0.75;
    pen.fillRect(x, height - bottom - tall, Math.max(1, wide - 0.6), tall);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("bar2");
    pen.fillRect(x, height - bottom - (rows / crowd) * (height - top - bottom) - 1.5, Math.max(1.5, wide), 2.5);
  });
  canvas.setAttribute("aria-label", `latest step: ${last[0]} rows of ${slots}, ${last[1]} tokens of ${budget}`);
}

// A hue for each owner that stays the same while it lives.
export function hue(name) {
  let state = 7;
  for (const letter of name) state = (state * 31 + letter.charCodeAt(0)) % 100003;
  return `hsl(${200 + (state * 47) % 160} 62% 55%)`;
}

// cells: what each holds (0 blank, 1 cached, 2 shared, 3 + owner). Returns the cell under a point.
export function cells(canvas, values, owners) {
  const width = canvas.parentElement.clientWidth || 300;
  const size = Math.max(4, Math.min(18, Math.floor(Math.sqrt((width * 220) / Math.max(1, values.length)))));
  const columns = Math.max(1, Math.floor(width / size));
  const { pen } = surface(canvas, Math.ceil(values.length / columns) * size);
  const fixed = [colour("blank"), colour("cached"), colour("shared")];
  const hues = owners.map(hue);
  const gap = size > 6 ? 2 : 1;
  values.forEach((value, i) => {
    pen.fillStyle = fixed[value] ?? hues[value - 3] ?? colour("accent");
    pen.beginPath();
    pen.roundRect((i % columns) * size, Math.floor(i / columns) * size, size - gap, size - gap, size > 8 ? 3 : 1);
    pen.fill();
  });
  return (x, y) => {
    const i = Math.floor(y / size) * columns + Math.floor(x / size);
    return Math.floor(x / size) < columns && i < values.length ? i : -1;
  };
}
