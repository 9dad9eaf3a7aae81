document.getElementById("table").textContent = JSON.stringify(input.table);
globalThis.recollect.start();
scenario().then(answer, (error) => answer({ error: error.message }));
