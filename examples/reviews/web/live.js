// The live part of the page: each event is all of it, so that the page is right with the first one after any break.
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
    // The browser reconnects by itself, except after an answer that was no stream.
    if (mine.readyState === EventSource.CLOSED && source === mine) {
      source = null;
      setTimeout(listen, 1000);
    }
  };
}

// Browsers allow few connections to one host, so a tab that nobody sees gives its own back.
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
  const tell = (text, wrong) => {
    notice.textContent = text;
    notice.className = wrong ? "error" : "";
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
      tell(done.error.message, true);
    } else {
      tell(done.changed ? "Posted." : "It was so already.", false);
      form.elements.text.value = "";
    }
  } catch {
    tell("The service did not answer: post it again.", true);
  } finally {
    button.disabled = false;
  }
});
