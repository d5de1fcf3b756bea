// Regions to ignore: polygons drawn over an image, downloaded as the mask that `gepc fit --ignore` takes.
// The detector in use cannot change its regions. Its calibration images must ignore the same pixels as new images;
// otherwise their scores are not comparable and the p-values are not valid.

import { count } from "./words.js";

const $ = (id) => document.getElementById(id);
const SHADE = "#74b3e3";
let photo = null;
let regions = [[]]; // polygons as lists of corners [x, y] in pixels of the image; corners are added to the last one

const finished = () => regions.filter((corners) => corners.length > 2);

export function openMask(image) {
  if (image.src !== photo?.src) regions = [[]];
  photo = image;
  const canvas = $("mask-canvas");
  [canvas.width, canvas.height] = [photo.naturalWidth, photo.naturalHeight];
  // as large as fits, in the shape of the image
  const scale = Math.min(Math.min(0.8 * innerWidth, 880) / canvas.width, (0.5 * innerHeight) / canvas.height);
  canvas.style.width = `${scale * canvas.width}px`;
  canvas.style.height = `${scale * canvas.height}px`;
  $("mask").showModal();
  draw();
}

function outline(pen, corners) {
  pen.beginPath();
  for (const [x, y] of corners) pen.lineTo(x, y);
  pen.closePath();
}

function draw() {
  const canvas = $("mask-canvas");
  const pen = canvas.getContext("2d");
  const unit = canvas.width / canvas.clientWidth; // image pixels in a pixel of the screen
  pen.drawImage(photo, 0, 0);
  [pen.lineWidth, pen.strokeStyle] = [2 * unit, SHADE];
  for (const corners of regions) {
    outline(pen, corners);
    pen.stroke();
    pen.fillStyle = `${SHADE}99`;
    if (corners.length > 2) pen.fill();
    pen.fillStyle = SHADE;
    for (const [x, y] of corners) pen.fillRect(x - 3 * unit, y - 3 * unit, 6 * unit, 6 * unit);
  }
  $("mask-count").textContent = count(finished().length, "region");
  $("mask-next").disabled = regions.at(-1).length < 3;
  $("mask-undo").disabled = regions.length === 1 && !regions[0].length;
  $("mask-download").disabled = !finished().length;
}

function addCorner(event) {
  const box = $("mask-canvas").getBoundingClientRect();
  regions.at(-1).push([
    ((event.clientX - box.left) / box.width) * photo.naturalWidth,
    ((event.clientY - box.top) / box.height) * photo.naturalHeight,
  ]);
  draw();
}

function undo() {
  if (!regions.at(-1).length && regions.length > 1) regions.pop();
  regions.at(-1).pop();
  draw();
}

// White regions on black, in the size of the image.
function downloadMask() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [photo.naturalWidth, photo.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = "white";
  for (const corners of finished()) {
    outline(pen, corners);
    pen.fill();
  }
  canvas.toBlob((blob) => download(blob, "mask.png"), "image/png");
}

// Save a blob as a file of the user.
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

$("mask-canvas").addEventListener("click", addCorner);
$("mask-next").addEventListener("click", () => {
  regions.push([]);
  draw();
});
$("mask-undo").addEventListener("click", undo);
$("mask-download").addEventListener("click", downloadMask);
$("mask-close").addEventListener("click", () => $("mask").close());
