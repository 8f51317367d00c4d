// Tables and code that scroll take the focus, navigations and the search have names, and an empty corner heads nothing.
const mend = () => {
  for (const part of document.querySelectorAll("pre > code:not([tabindex])"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  document.querySelectorAll("th:empty").forEach(cell => cell.replaceWith(document.createElement("td")));
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) part.tabIndex = 0;
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(part => part.setAttribute("aria-label", `Tools of ${part.closest("pre").id}`));
  for (const part of document.querySelectorAll("nav[aria-labelledby]")) {
    part.setAttribute("aria-label", `Pages: ${part.querySelector(".md-nav__title")?.textContent.trim()}`);
    part.removeAttribute("aria-labelledby");
  }
};
mend();
addEventListener("resize", mend);
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
