// Beside a running job the page asks its server for what is new. From a file there is nothing to ask.

const LEAST_WAIT_MS = 2000;

function follow(taken) {
  if (!/^https?:$/.test(location.protocol)) return;
  const said = byId("live");
  said.hidden = false;
  let tag = "";
  let state = "";
  let wait = LEAST_WAIT_MS;
  const again = async () => {
    const began = performance.now();
    try {
      const answer = await fetch(`data${location.search}`, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        const content = await answer.json();
        taken(content);
        state = content.data.live ? `live: as of ${new Date().toLocaleTimeString()}` : "the job has ended; this is its trace";
      }
      if (answer.ok || answer.status === 304) said.textContent = state;
      else said.textContent = `the server answered ${answer.status}: ${(await answer.text()).slice(0, 300)}`;
    } catch (error) {
      said.textContent = `rankscope serve does not answer (${error.message}); this is what it last said`;
    }
    wait = Math.max(LEAST_WAIT_MS, 3 * (performance.now() - began));
    setTimeout(again, wait);
  };
  setTimeout(again, wait);
}
