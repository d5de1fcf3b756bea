// Calls to the service. An error response becomes an ApiError with the service's message.

const TOKEN = "gepc-token";
const TRIES = 6;

export class ApiError extends Error {
  constructor(status, message, results = null) {
    super(message);
    this.status = status;
    this.results = results;
  }
}

export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  for (let attempt = 1; ; attempt += 1) {
    let response;
    try {
      response = await fetch(path, { ...options, headers, credentials: "omit" });
    } catch {
      throw new ApiError(0, "The service did not answer. Is it still running?");
    }
    if (response.ok) return response.json();
    if (response.status === 503 && attempt < TRIES) {
      await pause(Math.min(30, Number(response.headers.get("Retry-After")) || 1));
      continue;
    }
    const answer = await response.json().catch(() => ({}));
    throw new ApiError(response.status, answer.error ?? `The service answered ${response.status}.`, answer.results);
  }
}

// The detector, with the false-alarm rates to choose from and the p-value limit of each.
export function describe() {
  return call("/v1/detector?rates=true");
}

// Scores and pictures of some files; the page decides for any rate by comparing p-values with its limit.
export function score(files, group) {
  const form = new FormData();
  for (const file of files) form.append("images", file, file.name || "pasted image");
  form.append("map", "true");
  form.append("seen", "true");
  form.append("explain", "true");
  if (group) form.append("group", group);
  return call("/v1/score", { method: "POST", body: form });
}
