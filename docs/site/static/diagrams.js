// Draws the diagrams of a page, in the colours of the theme, with the copy of mermaid beside this file.
(() => {
  const folder = document.currentScript.src.replace(/[^/]*$/, "");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    const theme = document.body.dataset.theme || "auto";
    return theme === "dark" || (theme === "auto" && dark.matches);
  }

  async function draw(places) {
    for (const place of places) {
      place.removeAttribute("data-processed");
      place.textContent = place.dataset.source;
    }
    mermaid.initialize({
      startOnLoad: false,
      theme: isDark() ? "dark" : "neutral",
      fontFamily: getComputedStyle(document.body).fontFamily,
    });
    await mermaid.run({ nodes: places });
  }

  document.addEventListener("DOMContentLoaded", () => {
    const places = [...document.querySelectorAll("pre.mermaid")];
    if (places.length === 0) return;
    for (const place of places) place.dataset.source = place.textContent;
    const script = document.createElement("script");
    script.src = folder + "mermaid.min.js";
    script.onload = () => {
      draw(places);
      dark.addEventListener("change", () => draw(places));
      new MutationObserver(() => draw(places)).observe(document.body, { attributeFilter: ["data-theme"] });
    };
    document.head.append(script);
  });
})();
