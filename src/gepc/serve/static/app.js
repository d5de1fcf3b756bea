// The page for images. All state is in `state`; the screen is drawn from it.

import { ApiError, describe, score, useToken } from "./api.js";
import { download, openMask } from "./mask.js";
import { count, csvLine, inWords, number, percent } from "./words.js";

const HISTORY = "gepc-history";
const HISTORY_LENGTH = 2000;
const PER_REQUEST = 8;
const AT_ONCE = 2;

const $ = (id) => document.getElementById(id);
// `rate` is one of the detector's false-alarm rates: { alpha, limit, low, high }
const state = { detector: null, rate: null, items: [], running: 0, history: loadHistory() };
let added = Math.max(0, ...state.history.map((row) => row.place));

// --- adding images ------------------------------------------------------------------------------------------------------

function add(files) {
  for (const file of files) {
    const item = { file, place: ++added, url: URL.createObjectURL(file), status: "waiting", result: null, error: null };
    const limit = state.detector?.limits.bytes_per_request;
    state.items.push(item);
    item.card = makeCard(item);
    $("gallery").append(item.card);
    if (limit && file.size > 0.98 * limit) fail(item, `The file is larger than ${count(limit, "byte")}.`);
  }
  draw();
  work();
}

function work() {
  if (!state.detector) return;
  while (state.running < AT_ONCE) {
    const batch = nextBatch();
    if (!batch.length) break;
    state.running += 1;
    send(batch).finally(() => {
      state.running -= 1;
      draw();
      work();
    });
  }
}

function nextBatch() {
  const { images_per_request: most, bytes_per_request: bytes } = state.detector.limits;
  const batch = [];
  let size = 0;
  for (const item of state.items) {
    if (item.status !== "waiting") continue;
    size += item.file.size + 1000;
    if (batch.length && (size > bytes || batch.length >= Math.min(most, PER_REQUEST))) break;
    item.status = "sent";
    batch.push(item);
  }
  return batch;
}

async function send(batch) {
  try {
    const answer = await score(batch.map((item) => item.file), $("group").value);
    if (answer.detector !== state.detector.detector) await connect();
    take(batch, answer.results, answer.detector);
  } catch (error) {
    if (error instanceof ApiError && error.results) take(batch, error.results, state.detector.detector);
    else if (error.status === 401) {
      for (const item of batch) item.status = "waiting";
      state.detector = null;
      askForToken();
    } else for (const item of batch) fail(item, error.message, true);
  }
}

function take(batch, results, detector) {
  for (const result of results) {
    const item = batch[result.index];
    if (result.error !== null) fail(item, sentence(result.error));
    else {
      item.status = "done";
      item.result = { ...result, reference: referenceSize(), detector };
      show(item);
    }
    remember(item, detector);
  }
}

function fail(item, reason, again = false) {
  item.status = "failed";
  item.error = reason;
  show(item, again);
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function referenceSize() {
  return state.detector.groups[$("group").value] ?? state.detector.calibration_images;
}

// --- cards ----------------------------------------------------------------------------------------------------------

function makeCard(item) {
  const card = $("card").content.firstElementChild.cloneNode(true);
  const photo = card.querySelector(".photo");
  card.querySelector(".name").textContent = item.file.name || "pasted image";
  card.querySelector(".name").title = item.file.name;
  photo.alt = item.file.name || "pasted image";
  photo.addEventListener("load", () => fit(card, photo));
  photo.addEventListener("error", () => {
    fit(card, photo); // a format that the browser cannot show; replaced by the network's view
    item.unseen = true;
    if (item.result?.seen && photo.src !== item.result.seen) photo.src = item.result.seen;
  });
  card.querySelector(".retry").addEventListener("click", () => {
    item.status = "waiting";
    item.error = null;
    show(item);
    draw();
    work();
  });
  card.querySelector(".ignore").addEventListener("click", () => openMask(photo));
  photo.src = item.url;
  paint(card, "waiting", "Waiting");
  return card;
}

// Make the photo as large as fits, cropped as the network sees it, with the map exactly over it.
function fit(card, photo) {
  const shown = photo.complete && photo.naturalWidth > 0;
  photo.classList.toggle("broken", !shown);
  card.querySelector(".no-preview").hidden = shown;
  card.querySelector(".ignore").disabled = !shown;
  if (!shown) return;
  const box = card.querySelector(".picture");
  const input = state.detector?.input;
  const cropped = input?.resize === "crop";
  const ratio = cropped ? input.width / input.height : photo.naturalWidth / photo.naturalHeight;
  const width = Math.min(box.clientWidth, box.clientHeight * ratio);
  for (const image of card.querySelectorAll("img, .regions")) {
    image.style.width = `${width}px`;
    image.style.height = `${width / ratio}px`;
  }
  photo.classList.toggle("small", photo.naturalWidth < 64); // show its pixels instead of blurring them
  photo.style.objectFit = cropped ? "cover" : "fill";
}

function paint(card, kind, verdict) {
  card.className = `card ${kind}`;
  card.querySelector(".verdict").textContent = verdict;
}

function show(item, again = false) {
  const { card, result } = item;
  card.querySelector(".retry").hidden = !again;
  if (item.status === "failed") {
    paint(card, "failed", "Could not be scored");
    card.querySelector(".words").textContent = item.error;
  } else if (item.status === "done") {
    card.querySelector(".words").textContent = inWords(result.p_value, result.reference);
    card.querySelector(".score").textContent = number(result.score);
    card.querySelector(".p").textContent = number(result.p_value);
    card.querySelector(".dot").style.left = `${100 * trackPosition(result.p_value)}%`;
    card.querySelector(".reasons").replaceChildren(...reasons(result));
    if (item.unseen && result.seen) card.querySelector(".photo").src = result.seen;
    if (result.map) {
      const heat = card.querySelector(".heat");
      heat.src = result.map;
      heat.alt = `Map of ${item.file.name || "the pasted image"}: where it stands out from the calibration images`;
      heat.hidden = false;
      card.querySelector(".whole").hidden = result.map_start === 0;
      heat.decode().then(() => drawRegions(card, heat, result.regions ?? []), () => {});
    }
    decide(item);
  } else paint(card, "waiting", "Waiting");
}

// The parts of the score, the most unusual first; the part that is the reason for an alarm is marked.
function reasons({ evidence, reason }) {
  return Object.entries(evidence ?? {}).sort((a, b) => a[1] - b[1]).map(([part, p]) => {
    const line = document.createElement("li");
    line.classList.toggle("reason", part === reason);
    line.textContent = `${part}: p ${p < 1e-4 ? "< 0.0001" : `= ${number(p)}`}`;
    return line;
  });
}

// Boxes around what stands out, in pixels of the map.
function drawRegions(card, heat, regions) {
  card.querySelector(".regions").replaceChildren(...regions.map((region) => {
    const box = document.createElement("div");
    box.style.top = `${100 * region.top / heat.naturalHeight}%`;
    box.style.left = `${100 * region.left / heat.naturalWidth}%`;
    box.style.height = `${100 * (region.bottom - region.top) / heat.naturalHeight}%`;
    box.style.width = `${100 * (region.right - region.left) / heat.naturalWidth}%`;
    const p = region.p_value === null ? "" : `, p = ${number(region.p_value)}`;
    box.title = `${region.part ?? "map"} ${number(region.score)}${p}, ${count(region.area, "pixel")}`;
    return box;
  }));
}

function trackPosition(p) {
  const smallest = state.detector.smallest_alpha;
  return Math.min(1, Math.max(0, Math.log(p) / Math.log(smallest)));
}

// The service computed the limit of every rate; the page only compares.
const isAlarm = (p) => p <= state.rate.limit;

function decide(item) {
  const alarm = isAlarm(item.result.p_value);
  paint(item.card, alarm ? "unusual" : "normal", alarm ? "Unusual" : "Looks normal");
}

// --- summary, controls ----------------------------------------------------------------------------

function draw() {
  const done = state.items.filter((item) => item.status === "done");
  const failed = state.items.filter((item) => item.status === "failed").length;
  const finished = done.length + failed;
  const alarms = done.filter((item) => isAlarm(item.result.p_value)).length;
  const parts = [count(state.items.length, "image"), `${alarms} unusual`];
  if (failed) parts.push(`${failed} could not be scored`);
  if (finished < state.items.length) parts.push(`${state.items.length - finished} to go`);
  $("summary").textContent = state.items.length ? parts.join(", ") : "No images yet.";
  $("progress").hidden = finished === state.items.length;
  $("progress").max = state.items.length || 1;
  $("progress").value = finished;
  document.body.classList.toggle("has-images", state.items.length > 0);
  $("clear").disabled = !state.items.length && !state.history.length;
  $("csv").disabled = !state.history.length;
  order();
  drawHistory();
}

function order() {
  const byScore = $("sort").value === "unusual";
  const rank = (item) => item.result?.p_value ?? 2;
  const wanted = byScore
    ? [...state.items].sort((a, b) => rank(a) - rank(b) || (b.result?.score ?? 0) - (a.result?.score ?? 0))
    : state.items;
  wanted.forEach((item, place) => {
    if ($("gallery").children[place] !== item.card) $("gallery").insertBefore(item.card, $("gallery").children[place] ?? null);
  });
}

function setRate(index) {
  const { alpha } = (state.rate = state.detector.rates[index]);
  $("alpha").value = index;
  $("alpha").setAttribute("aria-valuetext", percent(alpha));
  $("alpha-value").textContent = percent(alpha);
  $("gallery").style.setProperty("--limit", `${100 * trackPosition(alpha)}%`);
  $("guarantee").textContent = guaranteeText(state.rate);
  for (const item of state.items) if (item.status === "done") decide(item);
  draw();
}

function guaranteeText({ alpha, low, high }, smallest = alpha <= state.detector.smallest_alpha) {
  const images = count(state.detector.guarantee.calibration_images, "calibration image");
  return `On average at most ${percent(alpha)} of normal images raise an alarm. ` +
    `With these ${images}, the rate lies between ${percent(low)} and ${percent(high)} with probability 0.9.` +
    (smallest ? ` ${images} allow no smaller rate.` : "");
}

function setOpacity() {
  const value = $("opacity").value;
  $("opacity-value").textContent = `${value} %`;
  $("gallery").style.setProperty("--map-opacity", value / 100);
}

// --- history of this session -------------------------------------------------------------------------------------------

function loadHistory() {
  try {
    return (JSON.parse(sessionStorage.getItem(HISTORY)) ?? []).map((row, place) => ({ place, ...row }));
  } catch {
    return [];
  }
}

function remember(item, detector) {
  const { score: value = null, p_value: p = null } = item.result ?? {};
  const name = item.file.name || "pasted image";
  state.history.push({ place: item.place, name, time: new Date().toISOString(), score: value, p, error: item.error, detector });
  // answers may arrive out of order; the history keeps the order in which images were added
  state.history = state.history.sort((a, b) => a.place - b.place).slice(-HISTORY_LENGTH);
  try {
    sessionStorage.setItem(HISTORY, JSON.stringify(state.history));
  } catch { /* storage is full: the history lasts until the page is closed */ }
}

function verdictOf(row) {
  if (row.p === null) return "not scored";
  return isAlarm(row.p) ? "unusual" : "normal";
}

function drawHistory() {
  $("history-count").textContent = `(${count(state.history.length, "image")})`;
  if (!state.rate) return;
  $("history").replaceChildren(...state.history.toReversed().map((row) => {
    const line = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = row.name;
    line.append(name);
    for (const text of [new Date(row.time).toLocaleTimeString(), number(row.score ?? NaN), number(row.p ?? NaN), verdictOf(row)]) {
      line.insertCell().textContent = text;
    }
    line.lastChild.className = verdictOf(row);
    return line;
  }));
}

function downloadCsv() {
  const head = ["image", "time", "score", "p_value", "alpha", "alarm", "error", "detector"];
  const rows = state.history.map((row) => [
    row.name, row.time, row.score, row.p, state.rate.alpha, row.p === null ? "" : String(isAlarm(row.p)), row.error, row.detector,
  ]);
  const text = `${[head, ...rows].map(csvLine).join("\r\n")}\r\n`;
  download(new Blob([text], { type: "text/csv" }), "gepc-scores.csv");
}

function clear() {
  for (const item of state.items) URL.revokeObjectURL(item.url);
  state.items = [];
  state.history = [];
  sessionStorage.removeItem(HISTORY);
  $("gallery").replaceChildren();
  draw();
  $("files").focus();
}

// --- the service ----------------------------------------------------------------------------------------------------

function problem(text) {
  $("problem").textContent = text ?? "";
  $("problem").hidden = !text;
}

function askForToken(again = false) {
  $("token-form").hidden = false;
  $("alpha").disabled = true;
  $("token").value = "";
  $("token").focus();
  problem(again ? "The token is wrong." : null);
}

async function connect() {
  const detector = await describe();
  state.detector = detector;
  const { calibration_images: n, method, passes_per_image: passes, guarantee, rates } = detector;
  $("about").textContent =
    `This ${method} detector compares each image with ${count(n, "normal calibration image")} and shows how unusual it is, and where. ` +
    `${passes.replace(/\+0J$/, "").replace(/^1F$/, "1 network pass").replace("F", " network passes")} per image.`;
  $("map-control").hidden = !detector.maps;
  $("legend-end").textContent = detector.maps ? `unusual (${number(detector.map_scale)} or more, same scale for all images)` : "";
  const groups = Object.keys(detector.groups);
  $("group-row").hidden = !groups.length;
  if ([...$("group").options].map((option) => option.value).join() !== groups.join()) {
    $("group").replaceChildren(...groups.map((name) => new Option(name, name)));
  }
  $("alpha").disabled = false;
  // space for the longest text, so that nothing moves when it changes
  $("guarantee-space").dataset.longest = guaranteeText({ alpha: 0.123, low: 0.123, high: 0.123 }, true);
  $("alpha").max = rates.length - 1;
  const wanted = rates.findIndex((rate) => rate.alpha >= (state.rate?.alpha ?? guarantee.alpha));
  setRate(wanted < 0 ? rates.length - 1 : wanted);
  document.documentElement.dataset.ready = "true";
}

async function start(again = false) {
  try {
    await connect();
    $("token-form").hidden = true;
    problem(null);
    work();
  } catch (error) {
    if (error.status === 401) askForToken(again);
    else problem(error.message);
  }
}

// --- events ---------------------------------------------------------------------------------------------------------

$("files").addEventListener("change", () => {
  add($("files").files);
  $("files").value = "";
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length) add(event.clipboardData.files);
});
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  add(event.dataTransfer.files);
});
$("alpha").addEventListener("input", () => {
  setRate(Number($("alpha").value));
});
$("opacity").addEventListener("input", setOpacity);
$("sort").addEventListener("change", order);
$("csv").addEventListener("click", downloadCsv);
$("clear").addEventListener("click", clear);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token").value);
  start(true);
});
window.addEventListener("resize", () => {
  for (const item of state.items) fit(item.card, item.card.querySelector(".photo"));
});

setOpacity();
start();
