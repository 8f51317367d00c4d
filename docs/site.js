// Tables that scroll take the focus, and navigations have names.
const mend = () => {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) part.tabIndex = 0;
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(part => part.setAttribute("aria-label", `Tools of ${part.closest("pre").id}`));
  for (const part of document.querySelectorAll("nav[aria-labelledby]")) {
    part.setAttribute("aria-label", `Pages: ${part.querySelector(".md-nav__title")?.textContent.trim()}`);
    part.removeAttribute("aria-labelledby");
  }
};
mend();
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
