// Keeps a page as new as its data while somebody looks at it, and gives it keys.
"use strict";
(() => {
  const LEAST_MS = 2000; // between two changes of a page
  const main = document.getElementById("main");
  const live = document.getElementById("live");
  let stream = null;
  let due = null;
  let isOld = false; // there is something newer, and a field has the focus

  // The server says the state of the page; where that is another one the page is asked for again and takes the place of the old.
  function follow() {
    if (stream || document.hidden) return;
    stream = new EventSource(`/changes${location.pathname}${location.search}`);
    stream.onopen = () => tell("live", false);
    stream.onerror = () => tell(stream && stream.readyState === EventSource.CLOSED ? "not live: load again" : "", true);
    stream.onmessage = (event) => {
      if (event.data !== main.dataset.state && !due && !isOld) due = setTimeout(refresh, LEAST_MS / 2);
    };
  }

  function tell(text, lost) {
    live.textContent = text;
    live.classList.toggle("lost", lost);
  }

  function leave() {
    if (stream) stream.close();
    stream = null;
  }

  async function refresh() {
    try {
      const answer = await fetch(location.href);
      if (answer.status === 401) return location.reload(); // the server was started anew
      replace(new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main"));
    } catch {
      tell("not live: no answer", true);
    }
    setTimeout(() => { due = null; leave(); follow(); }, LEAST_MS / 2);
  }

  // Charts stay where they are and are drawn anew; so do open parts, what is written in fields, and the focus.
  function replace(fresh) {
    const focused = document.activeElement && document.activeElement.closest("form");
    if (!fresh) return;
    if (focused) {
      isOld = true;
      return tell("newer: leave the field", true);
    }
    const isOpen = new Map([...main.querySelectorAll("details[data-id]")].map((one) => [one.dataset.id, one.open]));
    for (const one of fresh.querySelectorAll("details[data-id]")) if (isOpen.has(one.dataset.id)) one.open = isOpen.get(one.dataset.id);
    for (const place of fresh.querySelectorAll("[id^=f]:not(script)")) {
      const old = document.getElementById(place.id);
      if (old && old.drawn) place.replaceWith(old);
    }
    main.replaceChildren(...fresh.childNodes);
    main.dataset.state = fresh.dataset.state;
    if (typeof figures !== "undefined" && figures.show) figures.show();
    else if (JSON.parse(document.getElementById("figures").textContent).length) location.reload();
    zoomable();
  }

  // A part of a timeline that is dragged over is asked for.
  function zoomable() {
    for (const place of main.querySelectorAll("[data-zoom]")) {
      if (place.followed) continue;
      place.followed = true;
      new MutationObserver((_, observer) => {
        if (!place.on) return;
        observer.disconnect();
        place.on("plotly_relayout", (change) => {
          const from = change["xaxis.range[0]"], until = change["xaxis.range[1]"];
          if (from !== undefined) location.search = `?from=${Math.max(0, from).toFixed(4)}&until=${until.toFixed(4)}`;
        });
      }).observe(place, { childList: true });
    }
  }

  function step(by) {
    const all = [...main.querySelectorAll(".sample")];
    const at = all.findIndex((one) => one.classList.contains("here"));
    const next = all[Math.min(all.length - 1, Math.max(0, at + by))];
    if (!next) return;
    if (at >= 0) all[at].classList.remove("here");
    next.classList.add("here");
    next.querySelector("summary").focus();
    next.scrollIntoView({ block: "nearest" });
  }

  main.addEventListener("focusout", (event) => {
    if (!isOld || (event.relatedTarget && event.relatedTarget.closest("form"))) return;
    isOld = false;
    tell("live", false);
    due = due || setTimeout(refresh, 0);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "j" || event.key === "k") return step(event.key === "j" ? 1 : -1);
    const target = [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === event.key);
    if (!target) return;
    event.preventDefault();
    target.matches("input") ? target.focus() : target.click();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
  addEventListener("pagehide", leave);
  addEventListener("pageshow", follow);
  zoomable();
  follow();
})();
