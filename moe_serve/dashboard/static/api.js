// Questions and orders to the page's own server. Every fault becomes {code, message, next_step}.
import { useEffect, useRef, useState } from "./vendor/preact-hooks.js";
import { signal } from "./vendor/signals.js";

/** {operator, needs_token, offered, csrf}: whether this browser may command, as the server says. */
export const session = signal(/** @type {any} */ ({ operator: false, needs_token: true, offered: false, csrf: "" }));

/** The longest a server may take: a plan's own deadline is 60 s. */
const ANSWER_MS = 90_000;
const WORDS = {
  404: "This server does not know it; update the page's server.",
  429: "Too many tries; wait a little.",
  503: "Not available now; try again.",
};

function faultOf(/** @type {number} */ status, /** @type {string} */ text) {
  try {
    const { error } = JSON.parse(text);
    if (error?.message) return { status, next_step: "", ...error };
  } catch { /* words of the server itself */ }
  const words = text.length < 300 && !text.includes("<") ? text.trim() : "";
  return { status, code: `http_${status}`, message: words || WORDS[/** @type {keyof typeof WORDS} */ (status)] || `The server answered ${status}.`, next_step: "" };
}

/**
 * One request. Never throws: a page server that is away is a fault like any other.
 * @param {string} path
 * @param {{method?: string, body?: any}} [order]
 * @returns {Promise<{ok: boolean, data: any, error: any}>}
 */
export async function ask(path, { method = "GET", body } = {}) {
  const headers = /** @type {Record<string, string>} */ (body === undefined ? {} : { "Content-Type": "application/json" });
  if (method !== "GET" && session.peek().csrf) headers["X-CSRF-Token"] = session.peek().csrf;
  try {
    const answer = await fetch(path, { method, headers, credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS), body: body === undefined ? undefined : JSON.stringify(body) });
    const text = await answer.text();
    if (!answer.ok) return { ok: false, data: null, error: faultOf(answer.status, text) };
    return { ok: true, data: text ? JSON.parse(text) : null, error: null };
  } catch {
    return { ok: false, data: null, error: { status: 0, code: "unreachable", message: "This page's server does not answer.", next_step: "It is tried again by itself." } };
  }
}

/** Ask the server whether this browser is an operator. */
export async function askSession() {
  const answer = await ask("/api/v1/session");
  session.value = answer.ok ? { offered: true, csrf: "", ...answer.data } : { operator: false, needs_token: true, offered: false, csrf: "" };
}

/** Refusals that mean: this browser is no operator any more, or its session is another. */
const ENDED = new Set(["not_operator", "csrf"]);

/** Give an order. A session that has ended is noticed here. */
export async function order(/** @type {string} */ name, /** @type {any} */ body) {
  const answer = await ask(`/api/v1/${name}`, { method: "POST", body: body ?? {} });
  if (!answer.ok && answer.error.status === 403 && ENDED.has(answer.error.code)) await askSession();
  return answer;
}

/**
 * The newest answer to a question that is asked again with each new `tick`; null before the first.
 * One is under way at most: a slow answer is waited for, not asked for twice.
 */
export function useAsked(/** @type {string} */ path, /** @type {any} */ tick) {
  const [answer, put] = useState(/** @type {any} */ (null));
  const state = useRef({ asking: "", gone: false, path });
  state.current.path = path;
  useEffect(() => () => { state.current.gone = true; }, []);
  useEffect(() => {
    const now = state.current;
    if (!path || now.asking === path) return;
    now.asking = path;
    ask(path).then((got) => {
      if (now.asking === path) now.asking = "";
      if (!now.gone && now.path === path) put({ ...got, path });
    });
  }, [path, tick]);
  return answer?.path === path ? answer : null;
}
