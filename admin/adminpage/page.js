// Replaces the parts of the page that have changed, when the server sends them.
(function () {
  "use strict";
  var live = document.getElementById("live"), forms = document.getElementById("forms"), state = document.getElementById("connection");
  if (!live || !window.EventSource) { return; }
  var all = function (root, what) { return Array.prototype.slice.call(root.querySelectorAll(what)); };
  var fill = function (to, from) { to.replaceChildren.apply(to, Array.prototype.slice.call(from.childNodes)); };
  var source = new EventSource(location.pathname + location.search);
  source.onopen = function () { state.textContent = "Live."; };
  source.onerror = function () {
    state.textContent = source.readyState === EventSource.CLOSED ? "Not live: reload the page." : "Reconnecting…";
  };
  window.addEventListener("pagehide", function () { source.close(); });
  window.addEventListener("pageshow", function (e) { if (e.persisted) { location.reload(); } });

  // A form that is being filled in stays.
  var touched = function () {
    return forms.contains(document.activeElement) || all(forms, "input, textarea, select").some(function (e) {
      return e.tagName === "SELECT" ? all(e, "option").some(function (o) { return o.selected !== o.defaultSelected && e.selectedIndex > 0; })
        : e.type === "checkbox" ? e.checked : e.value !== e.defaultValue;
    });
  };

  source.onmessage = function (event) {
    var chosen = window.getSelection();
    if (chosen && !chosen.isCollapsed && live.contains(chosen.anchorNode)) { return; } // text is being copied
    var page = new DOMParser().parseFromString(event.data, "text/html");
    var fresh = page.getElementById("live"), freshForms = page.getElementById("forms");
    var scrolled = all(live, ".scroll, pre").map(function (e) { return [e.scrollLeft, e.scrollTop]; });
    var open = all(live, "details[open]").map(function (e) { return e.id; });
    all(fresh, "details").forEach(function (e) { if (open.indexOf(e.id) >= 0) { e.open = true; } });
    var focusable = "a, summary, [tabindex]";
    var focused = document.activeElement, place = all(live, focusable).indexOf(focused);
    var name = focused && focused.getAttribute && focused.getAttribute("href");
    fill(live, fresh);
    all(live, ".scroll, pre").forEach(function (e, i) { if (scrolled[i]) { e.scrollLeft = scrolled[i][0]; e.scrollTop = scrolled[i][1]; } });
    if (place >= 0) {
      var same = all(live, focusable);
      var next = name && same.filter(function (e) { return e.getAttribute("href") === name; })[0] || same[place];
      if (next) { next.focus({ preventScroll: true }); }
    }
    if (forms.innerHTML !== freshForms.innerHTML && !touched()) { fill(forms, freshForms); }
  };
})();
