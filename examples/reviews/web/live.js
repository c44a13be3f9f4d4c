// The live part of the page: each event is all of it, so that the page is right with the first one after any break.
"use strict";

const live = document.getElementById("live");
const connection = document.getElementById("connection");

function say(text) {
  connection.textContent = text;
  connection.hidden = false;
}

function listen() {
  const source = new EventSource("/live" + location.search);
  source.addEventListener("page", (e) => {
    live.innerHTML = e.data;
    say("live");
  });
  source.addEventListener("trouble", () => say("the database does not answer"));
  source.onerror = () => {
    say("reconnecting…");
    // The browser reconnects by itself, except after an answer that was no stream.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 1000);
  };
}

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
