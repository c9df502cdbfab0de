// Draws every figure.chart of the page with uPlot. All charts share what they are drawn by (step, tokens or time), its
// range, smoothing and the kind of axis.
"use strict";
(() => {
  const STEPS = "x";
  const figures = [...document.querySelectorAll("figure.chart")];
  const state = { axis: "step", smoothing: 0, log: false, range: null, hidden: new Set() };
  const charts = (window.primusCharts = []);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runs = JSON.parse(document.getElementById("steps")?.textContent || "{}");
  // A chart has values only. The places of its lines' points are those of their runs.
  const written = figures.map((figure) => {
    const made = JSON.parse(figure.querySelector("script").textContent);
    for (const line of made.lines) {
      const run = runs[line.label];
      const at = line.at || run.step.map((_, place) => place);
      line.points = at.map((place, index) => [run.step[place], line.values[index], run.tokens[place], run.seconds[place]]);
    }
    return made;
  });
  // What a chart is drawn by → its name, and its value in a point: step, value, tokens, seconds.
  const AXES = {
    step: { label: "step", of: (point) => point[0] },
    tokens: { label: "tokens", of: (point) => point[2] },
    minutes: { label: "minutes", of: (point) => (point[3] === null ? null : point[3] / 60) },
  };
  let data = [];
  let whole = { min: 0, max: 0 };

  function gather() {
    const x = AXES[state.axis];
    data = written.map((made) => {
      const lines = made.lines.map((line) => ({ ...line, points: line.points.filter((point) => x.of(point) !== null) }));
      const steps = [...new Set(lines.flatMap((line) => line.points.map(x.of)))].sort((a, b) => a - b);
      const place = new Map(steps.map((step, index) => [step, index]));
      for (const line of lines) {
        line.values = steps.map(() => undefined); // no such step in this run; null: a step without a value
        for (const point of line.points) line.values[place.get(x.of(point))] = point[1];
      }
      return { ...made, x: x.label, lines, steps };
    });
    const all = data.flatMap((one) => one.steps);
    whole = { min: Math.min(...all), max: Math.max(...all) };
    state.range = null;
  }

  // An exponential moving average that is not drawn towards 0 at its begin, as in TensorBoard.
  function smooth(values, weight) {
    let sum = 0, share = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  }

  const shown = (values) => (state.log ? values.map((v) => (v !== null && v !== undefined && v <= 0 ? null : v)) : values);

  // Not in exponents while digits are readable.
  function text(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return Number(value.toPrecision(4)).toExponential();
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 5 });
  }

  // Pixels for the longest of an axis' labels.
  function width_of(_, labels) {
    const longest = Math.max(0, ...(labels || []).map((label) => label.length));
    return Math.max(62, 16 + 8 * longest);
  }

  function crosses(chart, lines) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.fillStyle = css("--bad");
    ctx.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const line of lines)
      line.values.forEach((value, index) => {
        const at = chart.valToPos(chart.data[0][index], STEPS, true);
        if (value === null && !state.hidden.has(line.label) && at >= bbox.left && at <= bbox.left + bbox.width)
          ctx.fillText("✕", at, bbox.top + bbox.height - 4 * devicePixelRatio);
      });
    ctx.restore();
  }

  // A dashed line after each step from which a run was resumed.
  function resumes(chart, lines) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const line of lines.filter((line) => !state.hidden.has(line.label))) {
      const run = runs[line.label];
      for (const step of run.resumed) {
        const place = run.step.indexOf(step);
        const value = AXES[state.axis].of([step, null, run.tokens[place] ?? null, run.seconds[place] ?? null]);
        if (place < 0 || value === null) continue;
        const at = chart.valToPos(value, STEPS, true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.strokeStyle = css(`--s${line.colour}`);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  function zoom(range) {
    const few = (whole.max - whole.min) / 1e4 || 1;
    const wide = Math.min(Math.max(range.max - range.min, few), whole.max - whole.min || 1);
    const min = Math.min(Math.max(range.min, whole.min), whole.max - wide);
    state.range = min <= whole.min && min + wide >= whole.max ? null : { min, max: min + wide };
    for (const chart of charts) chart.setScale(STEPS, state.range || whole);
  }

  function scaled(factor, centre) {
    const { min, max } = state.range || whole;
    const middle = centre === undefined ? (min + max) / 2 : centre;
    zoom({ min: middle - (middle - min) * factor, max: middle + (max - middle) * factor });
  }

  // Two fingers zoom. One finger moves a zoomed chart sideways, and scrolls the page up and down.
  function touch(chart) {
    let last = null;
    const read = (event) => {
      const box = chart.over.getBoundingClientRect();
      const xs = [...event.touches].map((finger) => finger.clientX - box.left);
      return { count: xs.length, mid: xs.reduce((a, b) => a + b, 0) / xs.length, gap: Math.abs(xs[0] - (xs[1] ?? xs[0])) };
    };
    chart.over.style.touchAction = "pan-y";
    chart.over.addEventListener("touchstart", (event) => (last = read(event)), { passive: true });
    chart.over.addEventListener("touchmove", (event) => {
      const now = read(event);
      if (last && now.count === last.count) {
        if (now.count === 2 && now.gap > 0 && last.gap > 0) {
          event.preventDefault();
          scaled(last.gap / now.gap, chart.posToVal(now.mid, STEPS));
        }
        const { min, max } = state.range || whole;
        const by = chart.posToVal(last.mid, STEPS) - chart.posToVal(now.mid, STEPS);
        if (state.range) zoom({ min: min + by, max: max + by });
      }
      last = now;
    }, { passive: false });
    chart.over.addEventListener("touchend", () => (last = null), { passive: true });
  }

  function options(one, width) {
    const grid = { stroke: css("--rule"), width: 1 };
    const axis = { stroke: css("--fg"), font: "13px system-ui, sans-serif", grid, ticks: grid };
    const series = [{ label: one.x, value: (_, value) => text(value) }];
    for (const line of one.lines) {
      const stroke = css(`--s${line.colour}`);
      const common = { stroke, label: line.label, show: !state.hidden.has(line.label), spanGaps: false };
      const points = { show: line.points.length <= 40, size: line.width + 4, fill: stroke };
      if (state.smoothing > 0)
        series.push({ ...common, class: "raw", width: 1, alpha: 0.3, points: { show: false } });
      series.push({ ...common, width: line.width, points, value: (_, value) => text(value) });
    }
    return {
      width, height: 300, series,
      scales: { x: { time: false }, y: state.log ? { distr: 3, log: 10 } : {} },
      axes: [
        { ...axis, label: one.x, labelFont: "13px system-ui, sans-serif", labelSize: 22, space: 60 },
        { ...axis, size: width_of, values: (_, splits) => splits.map((value) => (value === null ? "" : text(value))) },
      ],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, focus: { prox: 24 } },
      focus: { alpha: 0.5 },
      hooks: {
        setSelect: [(chart) => {
          if (chart.select.width < 4) return;
          const [from, to] = [chart.select.left, chart.select.left + chart.select.width];
          const range = { min: chart.posToVal(from, STEPS), max: chart.posToVal(to, STEPS) };
          chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoom(range);
        }],
        setSeries: [(chart, index, change) => {
          if (index === null || !change || change.show === undefined) return;
          const name = chart.series[index].label;
          if (state.hidden.has(name) === !change.show) return;
          state.hidden[change.show ? "delete" : "add"](name);
          draw();
        }],
        draw: [(chart) => crosses(chart, one.lines), (chart) => resumes(chart, one.lines)],
      },
    };
  }

  function columns(one) {
    const found = [one.steps];
    for (const line of one.lines) {
      if (state.smoothing > 0) found.push(shown(line.values));
      found.push(shown(state.smoothing > 0 ? smooth(line.values, state.smoothing) : line.values));
    }
    return found;
  }

  function draw() {
    for (const chart of charts.splice(0)) chart.destroy();
    figures.forEach((figure, index) => {
      const place = figure.querySelector(".plot");
      const one = data[index];
      const made = { ...options(one, place.clientWidth) };
      made.cursor.drag.setScale = false; // zoom() sets it on every chart
      const chart = new uPlot(made, columns(one), place);
      charts.push(chart);
      chart.setScale(STEPS, state.range || whole);
      chart.over.addEventListener("dblclick", () => zoom(whole));
      touch(chart);
      // A click on a name in the legend hides its line. Enter and the space bar do the same.
      const names = () => figure.querySelectorAll(".u-series:not(:first-child) th");
      names().forEach((name, place) => {
        Object.assign(name, { tabIndex: 0, role: "button" });
        name.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          name.click();
          names()[place].focus();
        });
      });
    });
  }

  const by = (id) => document.getElementById(id);
  by("smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value);
    event.target.nextElementSibling.textContent = event.target.value;
    draw();
  });
  for (const option of by("axis").options) {
    const x = AXES[option.value];
    option.disabled = !written.some((made) => made.lines.some((line) => line.points.some((point) => x.of(point) !== null)));
  }
  by("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    gather();
    draw();
  });
  by("log").addEventListener("change", (event) => { state.log = event.target.checked; draw(); });
  by("in").addEventListener("click", () => scaled(0.5));
  by("out").addEventListener("click", () => scaled(2));
  by("reset").addEventListener("click", () => zoom(whole));
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", draw);
  new ResizeObserver(() => {
    for (const chart of charts) {
      const width = chart.root.parentElement.clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: 300 });
    }
  }).observe(document.body);
  gather();
  if (figures.length) draw();
})();
