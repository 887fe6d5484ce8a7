// Wires the parts of the page: views, theme, settings, chat and status.

import { ApiKeys } from "./api_key.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { StatusFeed } from "./status_feed.js";
import { StatusView } from "./status_view.js";
import { showServed } from "./served.js";
import { startTheme } from "./theme.js";

startTheme();
const keys = new ApiKeys();
const feed = new StatusFeed();
new Chat(new Settings(), keys, feed);
const statusView = new StatusView(byId("status-root"), keys);
feed.listen(showServed);
feed.listen((state) => statusView.show(state));
showView();
window.addEventListener("hashchange", showView);

function showView() {
  const view = location.hash === "#status" ? "status" : "chat";
  byId("chat-view").hidden = view !== "chat";
  byId("status-view").hidden = view !== "status";
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
  statusView.setVisible(view === "status");
  feed.setPace(view === "status" ? "fast" : "slow");
}
