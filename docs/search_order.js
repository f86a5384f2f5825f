// The order of what the site's search finds: Sphinx's weights, then the page of questions, the guides and the glossary before the
// reference; reports, CHANGELOG and CONTRIBUTING last. Decisions are not searched (conf.py).
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
    const folders = [["docs/questions", 10], ["docs/guides/", 5], ["docs/glossary", 5], ["docs/results/", -50], ["C", -50]];
    const found = folders.find(([folder]) => page.startsWith(folder));
    return score + (found ? found[1] : 0);
  },
};
