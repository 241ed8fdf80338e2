// Changes the token for a cookie that no script can read. A link may bring the token behind its #, which browsers send to nobody.
"use strict";
const told = document.getElementById("told");

async function signIn(token) {
  const answer = await fetch("/session", { headers: { authorization: `Bearer ${token}` } });
  if (answer.status === 204) location.reload();
  else told.textContent = "This is not the token.";
}

document.getElementById("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(document.getElementById("token").value.trim());
});
const brought = new URLSearchParams(location.hash.slice(1)).get("token");
if (brought) {
  history.replaceState(null, "", location.pathname + location.search);
  signIn(brought);
}
