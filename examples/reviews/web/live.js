// The live part of the page. Each event contains the whole part, so the page is correct after the first
// event of a new connection.
"use strict";

const live = document.getElementById("live");
const connection = document.getElementById("connection");

function say(text) {
  connection.textContent = text;
  connection.hidden = false;
}

let source = null;

function listen() {
  if (source || document.hidden) return;
  const mine = (source = new EventSource("/live" + location.search));
  source.addEventListener("page", (e) => {
    live.innerHTML = e.data;
    say("live");
  });
  source.addEventListener("trouble", () => say("the database does not answer"));
  source.onerror = () => {
    say("reconnecting…");
    // The browser reconnects by itself, except after a response that is not an event stream.
    if (mine.readyState === EventSource.CLOSED && source === mine) {
      source = null;
      setTimeout(listen, 1000);
    }
  };
}

// Browsers allow few connections to one host, so a hidden tab closes its connection.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && source) {
    source.close();
    source = null;
  }
  listen();
});

listen();

const form = document.getElementById("post");
const notice = document.getElementById("notice");

form.addEventListener("submit", async (e) => {
  e.preventDefault();
  const button = form.querySelector("button");
  const fields = new FormData(form);
  const notify = (text, isError) => {
    notice.textContent = text;
    notice.className = isError ? "error" : "";
  };
  button.disabled = true;
  try {
    const answer = await fetch("/products/" + encodeURIComponent(fields.get("product")) + "/reviews", {
      method: "POST",
      headers: { "Content-Type": "application/json", Consistency: "strong" },
      body: JSON.stringify({
        author: fields.get("author"),
        stars: Number(fields.get("stars")),
        text: fields.get("text"),
      }),
    });
    const done = await answer.json();
    if (!answer.ok) {
      notify(done.error.message, true);
    } else {
      notify(done.changed ? "Posted." : "Nothing changed.", false);
      form.elements.text.value = "";
    }
  } catch {
    notify("The service did not answer: post it again.", true);
  } finally {
    button.disabled = false;
  }
});
