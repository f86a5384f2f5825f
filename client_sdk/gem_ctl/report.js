"use strict";
// Shows the values of a plot beside the mouse or a finger. What it reads goes into the page as text only.
const AS_SHARE = value => `${+(100 * value).toPrecision(3)} %`;
const AS_NUMBER = value => Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
const WHOLE = value => Math.round(value).toLocaleString("en");

// The index of the value of `all`, which rise, that is next to `wanted`.
function nearest(all, wanted) {
  let best = 0;
  all.forEach((value, index) => { if (Math.abs(value - wanted) < Math.abs(all[best] - wanted)) best = index; });
  return best;
}

// What there is at the point next to `wanted`: its place, and a line of text for it and for each value.
function found(plot, wanted) {
  const points = plot.lines.map(([name, x, y]) => [name, x, y, nearest(x, wanted)]);
  const place = points.map(([, x, , at]) => x[at]).reduce((one, other) => Math.abs(other - wanted) < Math.abs(one - wanted) ? other : one);
  const write = plot.share ? AS_SHARE : AS_NUMBER, half = (plot.bar - 1) / 2;
  const texts = [`${plot.axis}: ${half > 0 ? `${WHOLE(place - half)}–${WHOLE(place + half)}` : WHOLE(place)}`];
  for (const [name, x, y] of plot.lines) {
    const at = nearest(x, place);
    if (Math.abs(x[at] - place) <= (plot.to - plot.from) / 100) texts.push(`${name}: ${write(y[at])}`);
  }
  return [place, texts];
}

function attach(svg) {
  const plot = JSON.parse(svg.dataset.points), width = svg.viewBox.baseVal.width, scale = (plot.right - plot.left) / (plot.to - plot.from);
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line"), tip = document.createElement("div");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", plot.top);
  cross.setAttribute("y2", plot.bottom);
  tip.className = "tip";
  const hide = () => { cross.remove(); tip.remove(); };
  const show = event => {
    const box = svg.getBoundingClientRect(), pointed = plot.from + ((event.clientX - box.left) * width / box.width - plot.left) / scale;
    const [place, texts] = found(plot, pointed), at = plot.left + (place - plot.from) * scale;
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    tip.replaceChildren(...texts.map(text => { const row = document.createElement("div"); row.textContent = text; return row; }));
    const share = 100 * at / width, side = share < 50 ? "left" : "right";
    tip.style.left = tip.style.right = "auto";
    tip.style[side] = `calc(${share < 50 ? share : 100 - share}% + 8px)`;
    svg.append(cross);
    svg.after(tip);
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointercancel", hide);
}

document.querySelectorAll("svg[data-points]").forEach(attach);
