/** The end of each client in node: runs its features and prints what went wrong in each, as JSON in one line. */
const LIMIT_S = 60;

/** Calls functions, by the names of features, which fail if a feature does not work. */
export async function features(table) {
  const problems = {};
  for (const [name, feature] of Object.entries(table)) {
    const late = new Promise((_, reject) => setTimeout(reject, LIMIT_S * 1000, `no result in ${LIMIT_S} s`));
    problems[name] = await Promise.race([feature(), late]).then(
      () => null,
      (error) => (console.error(error), String(error).slice(0, 500)),
    );
  }
  console.log(JSON.stringify(problems));
  process.exit();
}
