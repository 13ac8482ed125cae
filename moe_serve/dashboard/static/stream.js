// The page's one event stream. Closed while the tab is hidden: a browser allows six connections a
// host, and a hidden tab needs none.

/** A stream is called lost when nothing came for so long; the server speaks every second. */
const SILENCE_MS = 5000;

/**
 * @param {Record<string, (data: any) => void>} on  handlers by event name
 * @param {(state: "open" | "lost") => void} tell
 */
export function listen(on, tell) {
  /** @type {EventSource | null} */
  let source = null;
  let heard = performance.now();

  const open = () => {
    source?.close();
    source = new EventSource("/api/v1/stream");
    heard = performance.now();
    for (const [name, handle] of Object.entries(on)) {
      source.addEventListener(name, (event) => {
        heard = performance.now();
        tell("open");
        handle(JSON.parse(/** @type {MessageEvent} */ (event).data));
      });
    }
    // EventSource gives up for good on a refusal (503: too many browsers); try again.
    source.addEventListener("error", () => { if (source?.readyState === EventSource.CLOSED) setTimeout(visible, 3000); });
  };
  const visible = () => {
    if (document.hidden) { source?.close(); source = null; } else if (source === null || source.readyState === EventSource.CLOSED) open();
  };
  document.addEventListener("visibilitychange", visible);
  setInterval(() => { if (!document.hidden && performance.now() - heard > SILENCE_MS) tell("lost"); }, 1000);
  visible();
}
