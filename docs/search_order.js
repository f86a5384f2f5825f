// The order of the site's search: Sphinx's weights, then guides before reference, and reports and decisions last.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => {
    const folders = [["docs/decisions/", -100], ["docs/results/", -50], ["CHANGELOG", -50], ["docs/guides/", 5]];
    const found = folders.find(([folder]) => page.startsWith(folder));
    return score + (found ? found[1] : 0);
  },
};
